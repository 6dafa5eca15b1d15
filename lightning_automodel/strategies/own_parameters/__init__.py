"""Parameters of a LightningModule's own, beside models and layers: a temperature, prompts, weights of losses.

No forward pass tells when to gather them, so each rank holds them whole. Optimizers, hooks and checkpoints have
DTensors of the mesh that all parameters have; where the user's code computes, the attributes are plain tensors in the
same memory. Of ``self.temperature``, in a step of two ranks with different samples::

                             GPU 0      GPU 1
    self.parameters()        0.07       0.07       DTensor, Replicate
    self.temperature         0.07       0.07       plain, within a step
    gradient of it           2          4          until the backward pass ends
    self.temperature.grad    3          3          the DTensor's, by one all-reduce for all such parameters
"""
