"""Strategies of `laconic.distribute`: which ranks exchange parameters, and when."""
