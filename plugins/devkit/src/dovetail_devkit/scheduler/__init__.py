"""The parts of the scheduler suite: random sequences of calls, and checks of each step."""
