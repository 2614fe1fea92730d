"""Mutation tests: faults seeded into the sources one at a time, and the test that catches each."""
