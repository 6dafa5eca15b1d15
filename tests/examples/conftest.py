"""A folder in which every example runs as it is: what the quickstart leaves, but smaller."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.records import write_records
from tests.finetuning.conftest import model_dir

__all__ = ["model_dir"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def workspace(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds ``examples`` and ``build/quickstart`` with tiny models, text, chats and pairs."""
    root = tmp_path_factory.mktemp("workspace")
    (root / "examples").symlink_to(ROOT / "examples")
    made = root / "build" / "quickstart"
    shutil.copytree(model_dir, made / "model")
    (made / "export").symlink_to(made / "model")
    shutil.copytree(model_dir, made / "experts", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(made / "experts")
    (made / "text").mkdir()
    for name in ("abc", "ast", "bisect"):
        (made / "text" / f"{name}.py").write_text(f"# {name}: def main(): return 42, and the lazy dog sleeps\n" * 60)
    write_records(made)
    return root
