"""Step-time models: from measurements of an engine, from a decision log, or from a device sheet."""
