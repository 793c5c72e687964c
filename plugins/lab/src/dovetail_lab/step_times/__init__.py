"""Step-time models: from measurements of an engine, a decision log, or a device's data sheet."""
