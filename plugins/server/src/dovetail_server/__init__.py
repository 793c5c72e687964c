"""An OpenAI-compatible HTTP server based on `AsyncLLM`."""
