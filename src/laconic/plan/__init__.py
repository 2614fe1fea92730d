"""Forecasts the cost of a step before it runs: links, a method's messages, overlap with backward."""
