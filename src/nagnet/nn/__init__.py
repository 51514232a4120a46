"""Modules: residual rules, readouts, attention and MLP sublayers."""
