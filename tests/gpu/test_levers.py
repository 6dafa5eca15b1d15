"""Levers that need devices, on one GPU, or on two under ``torchrun --nproc-per-node 2 -m pytest tests/gpu``."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from tests.gpu.test_smoke import SIZES, fit, reference


def test_parameters_on_the_host(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    expected = torch.tensor(reference(tmp_path / "model"))
    for precision, bound in (("32-true", 1e-5), ("bf16-mixed", 2e-2)):
        strategy = FSDP2TPStrategy(config=FSDP2Config(offload_policy=True))
        found = fit(tmp_path / "model", tmp_path, precision, strategy, home="cpu")
        torch.testing.assert_close(torch.tensor(found), expected, rtol=bound, atol=0)
