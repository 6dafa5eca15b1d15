"""One GPU: what is not finite is found by the kernels of CUDA, and its step is left out on the device."""

import math

import lightning as L
import pytest
import torch

from lightning_automodel.strategies.steps.finite import FiniteGuard, can_defer

DEVICE = "cuda"


def module_of(*parts: torch.Tensor) -> L.LightningModule:
    module = L.LightningModule()
    module.trainer = L.Trainer(accelerator="cpu", barebones=True)
    module.parts = torch.nn.ParameterList(parts)
    return module


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_element_of_any_dtype_is_seen(dtype: torch.dtype, value: float) -> None:
    shapes = (8, 40), (), (0, 3), (700, 401)
    module = module_of(*(torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes))
    for part in module.parts:
        part.grad = torch.full_like(part, torch.finfo(dtype).max)  # finite, and its square is not
    module.parts[3].grad[699, 400] = value
    finding = FiniteGuard("error").inspect(torch.optim.SGD(module.parameters(), lr=1.0), module)
    assert finding.vector.tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_optimizer_leaves_its_step_out(dtype: torch.dtype) -> None:
    module = module_of(torch.ones(1000, dtype=dtype, device=DEVICE), torch.ones(7, 3, dtype=dtype, device=DEVICE))
    optimizer, guard = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True), FiniteGuard("skip")
    assert can_defer(optimizer) == (DEVICE == "cuda")
    for value in (1.0, torch.nan, torch.inf, 1.0):
        before = [part.detach().clone() for part in module.parts]
        for part in module.parts:
            part.grad = torch.full_like(part, 1.0)
        module.parts[1].grad[6, 2] = value
        guard.defer(guard.inspect(optimizer, module), optimizer)
        optimizer.step()
        kept = [torch.equal(part, old) for part, old in zip(module.parts, before, strict=True)]
        assert kept == [not math.isfinite(value)] * 2
    guard.settle()
    assert all(state["step"] == 2 for state in optimizer.state.values())
