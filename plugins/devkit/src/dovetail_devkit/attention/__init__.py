"""The parts of the attention suite: cases, tensors, and a dense float64 reference."""
