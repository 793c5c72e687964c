"""Checks whether a class meets the contract of its kind, and reads what it declares."""
