"""Runs other inference engines in separate processes, which exchange one JSON object per line.

`cpu_vs.py` and `vs_vllm_scheduler.py` are the commands; README.md describes the setup of the other
engines. Dovetail needs no module of this package. Only the `engine_*` and `scheduler_*` files,
which run in separate processes, import another engine.
"""
