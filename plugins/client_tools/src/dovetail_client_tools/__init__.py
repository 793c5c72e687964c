"""Load tests, batches and live displays for servers with the OpenAI API."""
