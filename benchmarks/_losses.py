"""Ways from hidden states to gradients, by this project and by others: what ``benchmarks.loss_memory`` runs.

``python -m benchmarks._losses TASK`` measures one in any environment; of ours nothing is imported but by ours.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks._measure import forget_peak, status


@dataclass(frozen=True, kw_only=True)
class Task:
    """One measurement."""

    way: str
    vocabulary: int
    tokens: int
    hidden: int
    chunk: int
    dtype: str
    device: str

    @property
    def ranks(self) -> int:
        """How many processes share the vocabulary."""
        return 2 if "cut" in self.way else 1


Loss = Callable[[Task, Tensor, Tensor, Tensor], Tensor]  # hidden [1, tokens, hidden], weight [rows, hidden], labels


def plain(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """transformers' loss of whole logits."""
    return ForCausalLMLoss(linear(hidden, weight), labels, task.vocabulary)


def whole(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Ours, of whole logits."""
    from lightning_automodel.loss.model_losses import causal_lm_loss

    return causal_lm_loss(linear(hidden, weight), labels, task.vocabulary)


def cut(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Ours, of logits cut on the vocabulary over 2 ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    from lightning_automodel.distributed.collectives import copy_in
    from lightning_automodel.loss.model_losses import causal_lm_loss
    from lightning_automodel.loss.sharded_logits import join_shards

    mesh, group = init_device_mesh(task.device, (task.ranks,)), dist.group.WORLD
    assert group is not None
    return causal_lm_loss(join_shards(linear(copy_in(hidden, group), weight), mesh, task.vocabulary), labels)


def chunked(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Ours, in chunks."""
    from lightning_automodel.chunked_loss import chunked_linear_cross_entropy

    group = dist.group.WORLD if task.ranks > 1 else None
    sizes: dict[str, Any] = {"chunk_size": task.chunk, "vocab_size": task.vocabulary}
    return chunked_linear_cross_entropy(hidden.flatten(0, 1), weight, shifted(labels), group=group, **sizes)


def compiled(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The plain way, by torch.compile."""
    return _compiled(hidden, weight, labels, task.vocabulary)


@torch.compile(dynamic=False)
def _compiled(hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    return ForCausalLMLoss(linear(hidden, weight), labels, vocabulary)


def torchs_own(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch's linear_cross_entropy in chunks of its own choice; torch 2.11 has none."""
    from torch.nn.functional import linear_cross_entropy

    options = torch.nn.LinearCrossEntropyOptions()
    return linear_cross_entropy(hidden.flatten(0, 1), weight, shifted(labels), options=options)


def torchs_own_in_our_chunks(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch's linear_cross_entropy in chunks of the size that ours has."""
    from torch.nn.functional import linear_cross_entropy

    options = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=task.chunk)
    return linear_cross_entropy(hidden.flatten(0, 1), weight, shifted(labels), options=options)


def liger(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger's fused kernel."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden.flatten(0, 1), weight, shifted(labels))


def nemo(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """nemo-automodel's ChunkedCrossEntropy, whose chunks are compiled."""
    return _nemos_loss(task.chunk)(hidden.flatten(0, 1), shifted(labels), weight)


def _nemos_loss(chunk: int) -> Any:
    from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy

    return _kept.setdefault(chunk, ChunkedCrossEntropy(chunk_len=chunk, reduction="mean"))


_kept: dict[int, Any] = {}


def shifted(labels: Tensor) -> Tensor:
    """Say what each position is judged against: label t + 1, and none for the last one."""
    return pad(labels, (0, 1), value=-100)[:, 1:].flatten()


OURS: dict[str, tuple[Loss, str]] = {
    "plain": (plain, "transformers' loss of whole logits"),
    "whole": (whole, "ours, of whole logits"),
    "cut": (cut, "ours, of logits cut on the vocabulary over 2 ranks"),
    "chunked": (chunked, "ours, in chunks"),
    "chunked, cut": (chunked, "ours, in chunks, the vocabulary cut over 2 ranks"),
}
NEMO = "nemo-automodel's ChunkedCrossEntropy"
PEERS: dict[str, Loss] = {
    "torch.compile of the plain loss": compiled,
    "torch's linear_cross_entropy": torchs_own,
    "torch's linear_cross_entropy, chunks of our size": torchs_own_in_our_chunks,
    "Liger's fused linear cross entropy": liger,
    NEMO: nemo,
}
LOSSES: dict[str, Loss] = {**{name: loss for name, (loss, _) in OURS.items()}, **PEERS}
COMPILED = ("torch.compile of the plain loss", NEMO)


def measure(task: Task) -> dict[str, float]:
    """Run one forward and backward pass on this rank: bytes above what was held, seconds, the loss and a norm."""
    torch.set_num_threads(1)
    if task.ranks > 1:
        if task.device == "cuda":
            torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group("nccl" if task.device == "cuda" else "gloo")
    # What is lazy is loaded at a small size; what is compiled, at its own.
    step(task if task.way in COMPILED else replace(task, tokens=8, vocabulary=64))
    tensors = inputs(task)
    before = reset_peak(task.device)
    start = clock(task.device)
    loss = LOSSES[task.way](task, *tensors)
    loss.backward()
    seconds = clock(task.device) - start
    result = {"peak": float(peak(task.device) - before), "seconds": seconds}
    norms = torch.stack([tensor.grad.norm() for tensor in tensors[:2] if tensor.grad is not None])
    result |= {"loss": float(loss), "norm": float(norms.norm())}
    if task.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return result


def step(task: Task) -> None:
    """One forward and backward pass."""
    LOSSES[task.way](task, *inputs(task)).backward()


def inputs(task: Task) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [1, tokens, hidden], this rank's rows of the weight, labels [1, tokens]."""
    dtype, device = getattr(torch, task.dtype), task.device
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    hidden = torch.randn(1, task.tokens, task.hidden, device=device, dtype=dtype).requires_grad_()
    rows = torch.empty(task.vocabulary, device="meta").chunk(task.ranks)[rank].numel()
    weight = torch.randn(rows, task.hidden, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    return hidden, weight, torch.randint(task.vocabulary, (1, task.tokens), device=device)


def clock(device: str) -> float:
    """Seconds of this process on the CPU, or of the wall."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: str) -> int:
    """Forgets the peak; returns what is held."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    forget_peak()
    return status("VmRSS")


def peak(device: str) -> int:
    """The most bytes held since then."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM")


if __name__ == "__main__":
    print("RESULT " + json.dumps(measure(Task(**json.loads(sys.argv[1])))))
