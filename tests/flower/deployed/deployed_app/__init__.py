"""What a client learns is a function of its partition, the round and the model: runs can be compared."""
