"""Scheduling policies from the literature: one module, one policy, one paper.

A policy actions and the core's scheduler grants; nothing here touches rows, blocks or plans. Each
is imported when it is chosen, so this package imports none of them.
"""
