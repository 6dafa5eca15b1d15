"""Which samples a data rank sees, whether ranks agree on them, and where it was in them."""
