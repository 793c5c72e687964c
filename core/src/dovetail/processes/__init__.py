"""Child processes: how they start, report, send heartbeats, and end.

The engine's process, the workers of an executor and the children with limits all use this package,
and an executor or a plugin of another distribution may use it, too.

    child_process  the parent's side of one child: start, wait until it is ready, kill
    child_group    several children that start together, are watched together and end together
    child_main     the child's side: `python -m dovetail.processes ENTRY BOOT`
    boot           the settings with which a child starts
    start_report   what a child reports about its start: phases, ready, failed
    liveness       the time that a child writes into shared memory, and its parent reads
    parent_death   how a child ends when its parent does
    ownership      objects that belong to the process that made them; forks do not use them
    startup_phases the phases of an engine's start, each with a deadline
"""
