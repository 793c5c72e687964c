"""What the executor suite is made of: workers that delay and fail on demand."""
