"""A Flower app: a small net learns to tell ten drawn signs apart."""
