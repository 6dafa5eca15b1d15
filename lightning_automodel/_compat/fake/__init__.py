"""Private names of torch with which one CPU process plays a rank of any run."""
