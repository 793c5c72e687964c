"""The simulator: an engine core with a virtual clock and an executor that computes step times."""
