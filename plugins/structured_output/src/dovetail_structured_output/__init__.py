"""Structured output with llguidance: the `llguidance` grammar plugin."""
