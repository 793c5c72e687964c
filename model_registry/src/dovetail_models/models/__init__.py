"""One file for each architecture. Nothing is imported here: entry points name the classes."""
