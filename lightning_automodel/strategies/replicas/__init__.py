"""Gradients over replicas (``DDPStrategy``): who averages them, when, in which dtype, and what users' hooks see."""
