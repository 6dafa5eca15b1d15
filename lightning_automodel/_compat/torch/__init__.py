"""Private names of torch outside of FSDP2 and DTensor."""
