"""One file an architecture. Nothing is imported here: entry points name the classes."""
