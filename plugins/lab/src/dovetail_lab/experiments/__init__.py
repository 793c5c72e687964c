"""Experiments: runs of several policies on the same workloads, metrics and paired statistics."""
