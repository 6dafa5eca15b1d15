"""Private names of DTensor."""
