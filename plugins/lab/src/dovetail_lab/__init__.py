"""Experiments with schedulers: replay and show decision logs. Depends only on the core."""
