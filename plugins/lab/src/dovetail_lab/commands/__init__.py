"""The `dovetail lab` commands for experiments, searches and single steps."""
