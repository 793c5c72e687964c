"""Load tests and batches for servers with the OpenAI API."""
