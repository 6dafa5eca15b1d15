"""In which dtypes a parallel model computes."""
