"""The entry point for offline use: `LLM`."""
