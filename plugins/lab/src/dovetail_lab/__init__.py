"""Experiments with schedulers: decision logs, replayed and shown. Knows the core only."""
