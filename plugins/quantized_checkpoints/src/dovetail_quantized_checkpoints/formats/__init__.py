"""The formats. Each module finds the quantized weights of a checkpoint and reads them."""
