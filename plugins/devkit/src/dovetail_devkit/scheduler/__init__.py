"""The parts of the scheduler suite: random programs, and a referee that checks each step."""
