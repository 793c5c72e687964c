"""Linear methods that quantize weights while they are loaded, for all devices."""
