"""The CPU platform and worker of Dovetail."""
