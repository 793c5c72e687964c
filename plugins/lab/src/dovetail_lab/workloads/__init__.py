"""Workloads: the requests of an experiment, the same for every policy."""
