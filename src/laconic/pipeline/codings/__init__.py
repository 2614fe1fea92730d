"""What may cross the boundary between two pipeline stages: one file a name."""
