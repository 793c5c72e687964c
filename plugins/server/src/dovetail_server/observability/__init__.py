"""Metrics, traces and the log of requests. None of this code runs for every token."""
