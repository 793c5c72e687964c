"""A simulation of a worker's rows, blocks and cache slots, for the fake workers."""
