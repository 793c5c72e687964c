"""What the worker suite is made of: a rig that drives a worker, and the sampling cases."""
