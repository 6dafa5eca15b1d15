"""Batches as padding leaves them: an odd number of tokens, and rows that end, or begin, with padding."""

import torch
from torch import Tensor

Batch = dict[str, Tensor]

TEXT = ("input_ids", "labels")


def ragged(batch: Batch) -> Batch:
    """``batch`` without its last token, with a mask: the last row ends with padding, the first one begins with some.

    Where a batch holds more than text, its first row stays as it is: images stand at its beginning.

    Args:
        batch: ``input_ids`` and ``labels`` [rows, tokens]; what else has tokens at dim 1 is cut as well.
    """
    tokens = batch["input_ids"].shape[1]
    cut = {name: x[:, :-1] if x.ndim > 1 and x.shape[1] == tokens else x for name, x in batch.items()}
    mask = torch.ones_like(cut["input_ids"])
    if batch.keys() == {*TEXT}:
        mask[0, :3] = 0
    mask[-1, -5:] = 0
    return {**cut, "labels": cut["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}
