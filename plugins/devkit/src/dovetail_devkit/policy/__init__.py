"""The parts of the policy suite: recording policies, short programs, checks of events."""
