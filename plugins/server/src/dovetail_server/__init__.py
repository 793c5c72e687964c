"""An OpenAI-compatible HTTP server on `AsyncLLM`."""
