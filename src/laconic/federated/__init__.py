"""Federated training: clients that meet a server now and then, over links that are slow both ways."""
