"""Report of a federated run: accuracy over bytes and rounds, bytes by round, participation."""
