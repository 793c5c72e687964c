"""From the columns of the core to what users get: tokens, text, log-probabilities, stop strings."""
