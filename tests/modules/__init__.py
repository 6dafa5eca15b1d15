"""Of any nn.Module."""
