"""Batches of requests in OpenAI's JSONL format: one request in each line, at low priority."""
