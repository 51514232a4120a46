"""Measurements of speed and memory: alternatives side by side, interleaved, in one process."""
