"""Experiments with schedulers: decision logs, simulations, comparisons.

This module depends only on the core.
"""
