"""The command line, `laconic`."""
