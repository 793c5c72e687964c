"""The tiers of `lab_validation.py`: how far the simulator agrees with the real engine."""
