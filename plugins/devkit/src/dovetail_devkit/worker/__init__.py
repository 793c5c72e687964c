"""The parts of the worker suite: a rig that drives a worker, and the sampling cases."""
