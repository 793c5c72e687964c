"""The check of a machine with an accelerator: what it proves, what it measures, what it prints."""
