"""The parts of the worker suite: a harness that calls a worker with plans, and sampling cases."""
