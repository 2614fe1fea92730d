"""Ways to train a model's blocks side by side: each file is a registered name."""
