"""The real engine in this process, driven by the same workloads and the same loop as the simulator.

`dovetail_lab.engine_runs.run_real` is the entry point.
"""
