"""Compiled passes over logits that nobody has asked for: where nothing can be compiled, they run as they are."""

import warnings

import pytest
import torch
from torch._inductor import config

from lightning_automodel.config import FSDP2Config
from lightning_automodel.loss.passes import Passes, _passes_that_may_fail, compiled_passes, passes_for
from lightning_automodel.loss.vocab_parallel import VocabShard, token_losses


def losses(passes: Passes | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token, and the gradient of their sum."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 11, generator=generator).requires_grad_()
    targets = torch.randint(11, (6,), generator=generator)
    found = token_losses(logits, targets, VocabShard(11), label_smoothing=0.1, passes=passes)
    found.sum().backward()
    assert logits.grad is not None
    return found.detach(), logits.grad


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    torch._dynamo.reset()
    said = pytest.warns(UserWarning, match=r"kernel by kernel, which takes longer: torch.compile failed .*C compiler")
    with config.patch({"cpp.cxx": ("/nowhere/compiler",)}), said:
        passes = _passes_that_may_fail.__wrapped__()
        found = losses(passes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = losses(passes)
    for those in (found, again):
        torch.testing.assert_close(those, losses(None))


def test_out_of_memory_is_no_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    passes = _passes_that_may_fail.__wrapped__()
    monkeypatch.setattr(passes.add_up, "_compiled", full)
    with pytest.raises(torch.OutOfMemoryError):
        losses(passes)


def test_who_compiles() -> None:
    assert passes_for(FSDP2Config(), "cpu") is None
    asked = FSDP2Config(enable_compile=True, compile_backend="eager")
    assert passes_for(asked, "cpu") is compiled_passes("eager", None)
    on_cuda = passes_for(FSDP2Config(), "cuda")
    assert on_cuda is (_passes_that_may_fail() if torch.cuda.is_available() else None)
