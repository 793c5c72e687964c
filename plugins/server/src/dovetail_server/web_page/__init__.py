"""The web page of the server: chat and live view. Static files, without external requests."""
