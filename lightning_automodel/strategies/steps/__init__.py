"""What stands around an optimizer's step: which steps are taken, by which optimizers, of which gradients."""
