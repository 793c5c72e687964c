"""The help lines of the options for a server, for commands that may not need a connection."""

URL_HELP = "Address of a server, such as http://127.0.0.1:8000."
API_KEY_FILE_HELP = "File with the API key of the server. Default: the variable DOVETAIL_API_KEY."
