"""Workloads: the requests of an experiment, equal for every policy."""
