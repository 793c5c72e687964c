"""The parts of the executor suite: workers that delay and fail on request."""
