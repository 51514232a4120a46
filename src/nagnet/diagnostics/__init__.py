"""Look inside a model: measurements of the residual stream, and the figures that show them."""
