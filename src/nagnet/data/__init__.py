"""Text sources, the byte-level tokenizer, token shards and the deterministic batch loader."""
