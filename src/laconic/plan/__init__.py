"""What a step will cost before it is run: links, the way of a method's messages, overlap with backward."""
