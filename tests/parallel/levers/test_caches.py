"""Caches of keys and values in training: a text that is read in two passes, of which the second goes on from the first,
under compiled blocks; and what blocks left empty is refused.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.activation_checkpointing.blocks import apply_activation_checkpointing
from lightning_automodel.parallel.compile import apply_compile
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.parallel.levers.support import LENGTH, token_ids
from tests.support.families import tiny_model

EAGER = "aot_eager"


def _llama() -> Any:
    model = tiny_model("llama", attention="sdpa").train()
    model.config.use_cache = True
    return model


def _in_two_passes(model: Any, *, by_flag: bool) -> dict[str, Tensor]:
    """The loss of a text's second half, which saw the first, and every gradient, whole."""
    first, second = token_ids().split(LENGTH // 2, dim=1)
    if by_flag:
        cache = model(first, use_cache=True).past_key_values
    else:
        cache = DynamicCache(config=model.config)
        model(first, past_key_values=cache)
    loss = model(second, past_key_values=cache, labels=second).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    model.zero_grad()
    return found


def segments(sizes: dict[str, int]) -> dict[str, float]:
    """Runs on each rank: the largest difference to one process for each way to keep a cache, and of a pass beside."""
    torch._dynamo.reset()
    whole = _llama()
    model = copy.deepcopy(whole)
    mesh = build_mesh(resolve_sizes(2, **sizes), "cpu")
    parallelize(model, mesh, FSDP2Config(enable_compile=True, compile_backend=EAGER))
    found = {}
    for by_flag in (True, False):
        expected, got = (_in_two_passes(one, by_flag=by_flag) for one in (whole, model))
        found[f"by_flag={by_flag}"] = max(((got[n] - e).norm() / e.norm()).item() for n, e in expected.items())
    ids = token_ids()
    found["beside"] = (model(ids, labels=ids).loss - whole(ids, labels=ids).loss).abs().item()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2}, {}], ids=["tp2", "dp2"])
def test_what_compiled_blocks_keep_is_what_one_process_keeps(sizes: dict[str, int], pool2: Pool) -> None:
    for found in pool2.run(segments, sizes, timeout=100):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("lever", ["compile", "checkpointing"])
def test_what_blocks_left_empty_is_refused(lever: str) -> None:
    model = _llama()
    if lever == "compile":
        apply_compile(model, backend=EAGER)
    else:
        apply_activation_checkpointing(model)
    first, second = token_ids().split(LENGTH // 2, dim=1)
    left_out = model(first).past_key_values  # what its config asks for
    for training in (True, False):
        with pytest.raises(ValueError, match="past_key_values of a pass that trained, in which blocks kept nothing"):
            model.train(training)(second, past_key_values=left_out)
    with torch.no_grad():
        kept = model.eval()(first).past_key_values
        assert model(second, past_key_values=kept).logits.shape[1] == second.shape[1]
