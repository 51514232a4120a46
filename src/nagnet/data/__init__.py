"""Text corpora, the byte-level tokenizer and the deterministic batch loader."""
