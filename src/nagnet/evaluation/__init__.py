"""Held-out measures of a language model and the statistics to compare two of them."""
