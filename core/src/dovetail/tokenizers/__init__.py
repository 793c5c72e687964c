"""Tokenizers and chat templates of the core. Importing this package loads no tokenizer library."""
