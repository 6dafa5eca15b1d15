"""What holds for any nn.Module: its structure, and code around its forward."""
