"""Report of a federated run."""
