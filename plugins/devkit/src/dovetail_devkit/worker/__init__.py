"""The parts of the worker suite: code that calls a worker with plans, and the sampling cases."""
