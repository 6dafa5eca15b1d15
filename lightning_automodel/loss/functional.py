"""Numbers from logits that are cut on the vocabulary: loss, log-probabilities, entropy, accuracy. Nothing is gathered.

Logits are DTensors of which an axis of the mesh cuts the last dimension, as ``model(..., labels=...)`` returns them
with tp > 1; or plain tensors, which are whole. Results are plain and equal on all ranks of that axis. All but the
accuracy have gradients.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_automodel.loss.passes import Passes
from lightning_automodel.loss.vocab_parallel import Ungathered, largest, token_entropies, token_losses, vocabulary_shard
from lightning_automodel.mesh import CP

IGNORE_INDEX = -100
REDUCTIONS = ("mean", "sum", "none")


def gather_logits(logits: Tensor) -> Tensor:
    """Gathers whole logits, [..., vocab], equal on all ranks; differentiable. A plain tensor is returned as it is."""
    if isinstance(logits, Ungathered):
        logits = logits.whole()
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Computes ``torch.nn.functional.cross_entropy`` for class indices, on the last dimension, in float32.

    Args:
        logits: [..., vocab].
        targets: [...], plain: token ids, or ``ignore_index``. Nothing is shifted.
        ignore_index: value of targets that do not count.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        reduction: "mean" over the targets that count (0 if none does), "sum" or "none".

    Returns:
        float32: a scalar, or [...] for "none".

    Raises:
        ValueError: for another reduction, targets of another shape (flattened ones are fine) or outside of the
            vocabulary, or label smoothing that is not a share.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not one of {', '.join(REDUCTIONS)}")
    losses = flat_losses(logits, targets, ignore_index, label_smoothing)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / count_targets(targets, ignore_index)


def flat_losses(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, passes: Passes | None = None
) -> Tensor:
    """Computes the loss of each target, [tokens]; arguments as for :func:`cross_entropy`, and compiled ``passes``."""
    local, shard = vocabulary_shard(logits)
    _check_shape(targets, local.shape[:-1])
    return token_losses(local.flatten(0, -2), targets.reshape(-1), shard, ignore_index, label_smoothing, passes)


def count_targets(targets: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Counts the ``targets`` that are not ignored, at least 1: what a mean divides by. No host synchronization."""
    return (targets != ignore_index).sum().clamp(min=1)


def entropy(logits: Tensor) -> Tensor:
    """Computes the entropy of each position's distribution, in nats: [...], float32, from ``logits`` [..., vocab]."""
    local, shard = vocabulary_shard(logits)
    return token_entropies(local.flatten(0, -2), shard).view(local.shape[:-1])


def top1(logits: Tensor) -> Tensor:
    """Finds the id of the largest logit of each position, [...], int64; the smallest id among equals. No gradient."""
    local, shard = vocabulary_shard(logits.detach())
    return largest(local.flatten(0, -2), shard).view(local.shape[:-1])


def top1_accuracy(logits: Tensor, targets: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Computes the share of the targets that are the most probable token: a float32 scalar, 0 if none counts.

    Args:
        logits: [..., vocab].
        targets: [...]; nothing is shifted.
        ignore_index: value of targets that do not count.

    Raises:
        ValueError: for targets of another shape; flattened ones are fine.
    """
    return count_hits(logits, targets, ignore_index).float() / count_targets(targets, ignore_index)


def count_hits(logits: Tensor, targets: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Counts the targets that are the most probable token, int64; arguments as for :func:`top1_accuracy`."""
    best = top1(logits)
    _check_shape(targets, best.shape)
    return ((best.view(targets.shape) == targets) & (targets != ignore_index)).sum()


def _check_shape(targets: Tensor, shape: torch.Size) -> None:
    if targets.shape not in (shape, (shape.numel(),)):
        raise ValueError(
            f"targets {list(targets.shape)} do not fit to logits [{', '.join(map(str, shape))}, vocab]: give one for "
            f"each position, {list(shape)}"
        )


def next_tokens(ids: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Shifts ``ids`` [..., seq] left by one; the last position becomes ``ignore_index``."""
    return torch.nn.functional.pad(ids[..., 1:], (0, 1), value=ignore_index)


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: Tensor, input_ids: Tensor, seq_index: Tensor | None = None
) -> Tensor:
    """Computes the log-probability of each next token.

    Args:
        vocab_parallel_logits: [batch, seq, vocab / tp] on each rank, a DTensor; a plain tensor is whole. With
            ``seq_index`` the axis ``cp`` of its mesh cuts the sequence.
        input_ids: [batch, seq], not shifted. With ``seq_index``: a plain tensor in the original order, or a DTensor cut
            as the logits are, in their order.
        seq_index: [seq], for context parallelism: the original position of what stands at each position of the logits
            as a whole. ``None``: they are in order.

    Returns:
        [batch, seq - 1], float32, plain, in the original order: at ``t`` the log-probability of token ``t + 1``.

    Raises:
        ValueError: if ``seq_index`` is given and no axis ``cp`` cuts the logits.
    """
    if seq_index is None:
        # All positions, the last one ignored: a slice of the logits would be a copy of them.
        targets = next_tokens(gather_logits(input_ids))
        return -cross_entropy(vocab_parallel_logits, targets, reduction="none")[:, :-1]
    logits = vocab_parallel_logits
    names = logits.device_mesh.mesh_dim_names or () if isinstance(logits, DTensor) else ()
    if CP not in names:
        raise ValueError(
            f"seq_index is for logits that the axis {CP!r} of their mesh cuts on the sequence, but these have the axes "
            f"{names}; leave it out, or pass DTensors on mesh[{CP!r}, 'tp'] with placements [Shard(1), Shard(2)]"
        )
    assert isinstance(logits, DTensor)
    return _logprobs_in_original_order(logits, input_ids, seq_index)


def _logprobs_in_original_order(logits: DTensor, input_ids: Tensor, seq_index: Tensor) -> Tensor:
    order = torch.argsort(seq_index)
    ids = input_ids.full_tensor()[:, order] if isinstance(input_ids, DTensor) else input_ids
    along = [Replicate() if placement.is_shard(2) else placement for placement in logits.placements]
    targets = distribute_tensor(ids.roll(-1, 1)[:, seq_index], logits.device_mesh, along, src_data_rank=None)
    local, shard = vocabulary_shard(logits)
    values = -token_losses(local.flatten(0, 1), targets.to_local().flatten(), shard)
    whole = DTensor.from_local(values.view(local.shape[:2]), logits.device_mesh, along, run_check=False)
    return whole.full_tensor()[:, order][:, :-1]
