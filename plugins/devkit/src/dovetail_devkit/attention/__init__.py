"""What the attention suite is made of: cases, tensors, and a dense float64 reference."""
