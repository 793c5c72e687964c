"""Tools for servers: load generator, live display, step traces, batches."""
