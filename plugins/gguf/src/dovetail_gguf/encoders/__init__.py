"""Encoders in GGUF files: BERT, RoBERTa and XLM-R, ModernBERT, and Nomic BERT.

configuration    the fields of config.json, checked against the tensors
pooling          how the file states that hidden states become one vector
weight_names     the names and layouts of tensors
tokenizer_rules  the rules of WordPiece, Unigram and RoBERTa's BPE
tokenizer_parts  the parts of a tokenizer.json
"""
