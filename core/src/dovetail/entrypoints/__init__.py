"""What people call: the offline `LLM`."""
