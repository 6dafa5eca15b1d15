"""Every layout against one process: loss, gradient norm, every gradient, and the parameters after several steps."""
