"""What the model suite checks beyond the results of a forward pass."""
