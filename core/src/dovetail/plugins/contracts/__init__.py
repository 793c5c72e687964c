"""Contracts: whether a class keeps the contract of its kind, and what it declares.

Looks at classes and interfaces; knows no plugin, no user and no distribution.
"""
