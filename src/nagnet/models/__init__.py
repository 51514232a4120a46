"""The GPT family in which only the residual rule differs between arms."""
