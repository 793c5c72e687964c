"""Child processes with limits on time and memory, for work on files and programs of strangers."""
