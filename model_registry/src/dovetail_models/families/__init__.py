"""One file for each family. Nothing is imported here: entry points name the classes."""
