"""The engine: its core (schedule, execute, update), and conversion between text and requests."""
