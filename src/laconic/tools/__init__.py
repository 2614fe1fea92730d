"""Command line tools. No other package imports them."""
