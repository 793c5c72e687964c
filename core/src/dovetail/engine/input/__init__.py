"""Creates and checks the core's requests: prompts, sampling parameters, tokenization."""
