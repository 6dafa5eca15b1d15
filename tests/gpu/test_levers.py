"""Levers that need GPUs: one, or two where a test says so. Not run where there is none."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_automodel import FSDP2Config, FSDP2TPStrategy, parallelize
from lightning_automodel.config.values import FLOAT8_RECIPES
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Pool
from tests.gpu.test_smoke import SIZES, Finetune, batches, fit, reference


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model on disk."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_parameters_on_the_host(saved: Path, tmp_path: Path) -> None:
    expected = torch.tensor(reference(saved))
    for precision, bound in (("32-true", 1e-5), ("bf16-mixed", 2e-2)):
        strategy = FSDP2TPStrategy(config=FSDP2Config(offload_policy=True))
        found = fit(saved, tmp_path, precision, strategy, home="cpu")
        torch.testing.assert_close(torch.tensor(found), expected, rtol=bound, atol=0)


@pytest.mark.parametrize("mode", ["full", "selective", "submodule"])
def test_activations_on_the_host(mode: str, saved: Path, tmp_path: Path) -> None:
    expected = torch.tensor(reference(saved))
    strategy = FSDP2TPStrategy(config=FSDP2Config(activation_checkpointing=mode, activation_offload=True))
    found = fit(saved, tmp_path, "32-true", strategy)
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("recipe", FLOAT8_RECIPES)
def test_float8(recipe: str, saved: Path, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs float8 in hardware")
    expected = torch.tensor(reference(saved))
    strategy = FSDP2TPStrategy(config=FSDP2Config(float8=recipe, enable_compile=True))
    found = fit(saved, tmp_path, "bf16-mixed", strategy)
    torch.testing.assert_close(torch.tensor(found), expected, rtol=5e-2, atol=0)


@contextmanager
def one_gpu() -> Iterator[DeviceMesh]:
    """A mesh of one process."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield build_mesh(resolve_sizes(1), "cuda")
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash_attn is not installed")
def test_flash_attention() -> None:
    torch.manual_seed(0)
    flash, plain = (
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation=name, dtype=torch.bfloat16).cuda()
        for name in ("flash_attention_2", "sdpa")
    )
    flash.load_state_dict(plain.state_dict())
    ids = torch.stack(batches()[:2]).cuda()
    with one_gpu() as mesh:
        flash = parallelize(flash, mesh, FSDP2Config(patch_is_packed_sequence=True))
        losses = [model(input_ids=ids, labels=ids).loss for model in (flash, plain)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
        for one, two in zip(flash.parameters(), plain.parameters(), strict=True):
            assert (one.grad.to_local() - two.grad).norm() < 0.05 * two.grad.norm()


# ---- two GPUs --------------------------------------------------------------------------------------------------------

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def train(path: Path, fields: dict, precision: str = "32-true") -> list[float]:
    """Runs on each rank."""
    strategy = FSDP2TPStrategy(tp=2, config=FSDP2Config(**fields))
    return fit(path, path, precision, strategy, home="cpu" if fields.get("offload_policy") else "cuda", devices=2)


@needs_two
@pytest.mark.parametrize("fields", [{"enable_async_tensor_parallel": True}, {"offload_policy": True}], ids=str)
def test_tensor_parallelism(fields: dict, pool2: Pool, saved: Path) -> None:
    blocks = {"sequence_parallel": True, "enable_compile": True}
    expected, found = (pool2.run(train, saved, {**blocks, **f}, trainer=True) for f in ({}, fields))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=0)


@needs_two
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_float8_on_slices(pool2: Pool, saved: Path) -> None:
    fields = {"sequence_parallel": True, "enable_compile": True, "float8": "tensorwise"}
    found = pool2.run(train, saved, fields, "bf16-mixed", trainer=True)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(reference(saved)), rtol=5e-2, atol=0)


def train_on_rows(path: Path, precision: str) -> list[float]:
    """Runs on each rank."""
    return fit(path, path, precision, FSDP2TPStrategy(cp=2), devices=2)


@needs_two
@pytest.mark.parametrize(("precision", "bound"), [("32-true", 1e-4), ("bf16-mixed", 2e-2)])
def test_context_parallelism(precision: str, bound: float, pool2: Pool, saved: Path) -> None:
    """Kernels of flash attention and, in float32, efficient attention, with the bias of a chunk of rows."""
    found = pool2.run(train_on_rows, saved, precision, trainer=True)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(reference(saved)), rtol=bound, atol=0)


def train_and_save(path: Path) -> list[int]:
    """Runs on each rank, which saves in the background: the devices on which its process has a context."""
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=FSDP2TPStrategy(async_save=True),
        max_epochs=1,
        default_root_dir=path,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Finetune(path), DataLoader(batches(), batch_size=2))
    return [device for device in range(2) if torch._C._cuda_hasPrimaryContext(device)]


@needs_two
def test_a_save_in_the_background_stays_on_its_device(pool2: Pool, saved: Path) -> None:
    assert pool2.run(train_and_save, saved, trainer=True) == [[0], [1]]
