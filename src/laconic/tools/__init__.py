"""The command line tools. No other package imports them."""
