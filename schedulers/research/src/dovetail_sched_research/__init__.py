"""Scheduling policies from the literature: each module implements one policy of one paper.

A policy yields actions, and the core's scheduler grants them; policies never change batch slots,
KV-cache blocks or plans. A policy is imported when it is selected, so this package imports none of
them.
"""
