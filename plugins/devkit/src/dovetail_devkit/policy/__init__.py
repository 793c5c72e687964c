"""What the policy suite is made of: recorded policies, small programs, and accounts of events."""
