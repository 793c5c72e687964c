"""The step trace: what each request did in each of the last steps, for displays and trace files."""
