"""Turns the core's output columns into users' outputs: tokens, text, log-probabilities."""
