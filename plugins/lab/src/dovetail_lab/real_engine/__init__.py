"""Runs workloads on the real engine in this process, with the same loop as the simulator.

`dovetail_lab.engine_runs.run_real` is the entry point.
"""
