"""`dovetail bench serve`: generates load, measures it and reports."""
