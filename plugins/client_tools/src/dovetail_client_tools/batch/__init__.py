"""`dovetail run-batch`: executes a file with requests, one in each line."""
