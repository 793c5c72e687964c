"""Inspection of single steps: a policy's view and actions, and why a request did not run."""
