"""Requirements of attention backends on a step: the order of runs, and shared memory."""
