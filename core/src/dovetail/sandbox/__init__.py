"""Child processes with limits on time and memory, for untrusted files and programs."""
