"""Readers of request traces, one module per format. All read streams in bounded memory."""
