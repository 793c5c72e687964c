"""The checks of the model suite that need more than the results of a forward pass."""
