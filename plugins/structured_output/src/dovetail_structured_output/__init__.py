"""Structured output with llguidance: the grammar plugin `llguidance`."""
