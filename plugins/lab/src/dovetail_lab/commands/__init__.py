"""The commands of the lab for experiments and searches."""
