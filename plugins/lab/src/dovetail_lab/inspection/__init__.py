"""Inspection of single steps: what a policy saw and did, and why a request did not run."""
