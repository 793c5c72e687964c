"""Experiments with schedulers: decision logs, simulations, comparisons.

Depends only on the core.
"""
