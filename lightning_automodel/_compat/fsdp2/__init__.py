"""Private names of FSDP2: its units, and what gathers, reduces and frees them."""
