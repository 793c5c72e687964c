"""The routes of the server. Each module handles the requests of one group of routes."""
