"""The four comparisons ("tiers") of `lab_validation.py`: simulator against real engine."""
