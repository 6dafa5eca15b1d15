"""Private names of other libraries: that they are there, and mean what they meant."""
