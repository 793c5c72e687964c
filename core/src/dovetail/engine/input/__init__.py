"""From what a user requests to what the core gets: prompts, parameters and their checks."""
