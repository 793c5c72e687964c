"""`dovetail run-batch`: executes a file with requests, one per line."""
