"""Tokens and text from a model, with a cache of keys and values."""
