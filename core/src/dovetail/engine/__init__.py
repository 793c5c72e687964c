"""The engine: its core (schedule, execute, update), and text to requests and back."""
