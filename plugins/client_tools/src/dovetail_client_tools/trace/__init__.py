"""`dovetail trace`: writes the steps of a decision log or of a running server as a trace."""
