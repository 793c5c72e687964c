"""Other inference engines, each in a process and an environment of its own, asked line by line.

`cpu_vs.py` and `vs_vllm_scheduler.py` are the commands; README.md says how peers are set up. No
module here is needed by Dovetail, and none but the `engine_*` and `scheduler_*` files, which run in
the peers' own processes, imports a peer.
"""
