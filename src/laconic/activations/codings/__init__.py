"""What an activation becomes while it waits for backward: a file a name."""
