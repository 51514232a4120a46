"""Text from a model."""
