"""Experiments with schedulers: replay and show decision logs. Depends on the core only."""
