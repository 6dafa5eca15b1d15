"""Tensor parallelism: parameters are stored as DTensors, and every forward pass computes on local tensors."""
