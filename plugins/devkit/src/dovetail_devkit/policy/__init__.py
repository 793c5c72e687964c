"""The parts of the policy suite: recorded policies, small programs, and accounts of events."""
