"""Metrics, traces and the log of requests. They observe requests; no part runs for each token."""
