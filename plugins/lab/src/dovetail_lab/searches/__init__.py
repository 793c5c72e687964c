"""Searches that run many experiments: over the options of a policy, and over workloads."""
