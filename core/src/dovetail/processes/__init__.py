"""Child processes: their start, reports, heartbeats and exit.

The engine's process, the workers of an executor and child processes with limits use this package.
Plugins of other distributions may use it too.

    affinity        the CPUs of this process, which its children inherit
    child_process   the parent's view of one child: start, wait until it is ready, kill
    child_group     several children that are started, watched and stopped together
    child_main      the child's side: `python -m dovetail.processes ENTRY BOOT`
    boot            the settings of a child
    start_report    reports of a child about its start: phases, ready, failed
    log_output      where a process and its children write their logs
    liveness        heartbeats in shared memory, which the parent reads
    parent_death    kills a child when its parent exits
    ownership       objects that belong to the process that created them; forks do not use them
    thread_priority lower priority for threads that work in the background
    startup_phases  phases of an engine's start, each with a deadline
"""
