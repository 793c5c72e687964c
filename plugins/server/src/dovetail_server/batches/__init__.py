"""Batches of requests in OpenAI's JSONL format: one request per line, at low priority."""
