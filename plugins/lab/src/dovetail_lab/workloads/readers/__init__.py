"""Readers of request traces, one module per format. Each reads a stream in bounded memory."""
