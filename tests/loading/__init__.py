"""from_pretrained and initialization on a mesh."""
