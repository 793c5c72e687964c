"""The conformance suites: one module for each plugin kind."""
