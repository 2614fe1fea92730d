"""Deployments: one file for each place where the replicas of a script can run."""
