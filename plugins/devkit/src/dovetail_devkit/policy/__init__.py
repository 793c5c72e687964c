"""The parts of the policy suite: recorded policies, short runs, and accounts of events."""
