"""Mathematics of the residual stream without parameters."""
