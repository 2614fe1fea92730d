"""Deployments, one per file."""
