"""Requirements of attention backends on a step: the order of requests, and shared memory."""
