"""The GPU check: correctness tests, measurements and their tables."""
