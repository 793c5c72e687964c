"""The executors that the core includes: `uniproc` and `multiproc`."""
