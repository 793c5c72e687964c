"""The fakes: one module for each plugin kind, with a minimal correct implementation."""
