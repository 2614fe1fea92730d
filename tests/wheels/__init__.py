"""Source distribution and wheels: build them, and try each in an empty environment (`make dist`)."""
