"""`dovetail top`: shows requests, steps, cache use and rates of a running server."""
