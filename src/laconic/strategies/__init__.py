"""Strategies: `laconic.distribute`; who talks to whom, and when."""
