"""The steps of a running engine, read from the route /steps of a server that is not trusted."""
