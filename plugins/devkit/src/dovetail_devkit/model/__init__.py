"""The checks of the model suite beyond the results of a forward pass."""
