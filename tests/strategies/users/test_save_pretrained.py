"""``model.save_pretrained`` from a user's hook: plain transformers reads what any layout wrote, bit by bit."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaForCausalLM

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.support.families import tiny_model
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.subjects import gather_part
from tests.support.training import Recorder, batches, make_trainer

CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shards": {"max_shard_size": "4KB"},
    "variant": {"variant": "fp16", "max_shard_size": "4KB", "safe_serialization": True},
    "other": {"save_original_format": False},
}


class Saving(Recorder):
    """Saves in the middle of training, in every way."""

    def __init__(self, directory: Path, tied: bool) -> None:
        super().__init__(tied)
        self.directory = directory
        self.expected: dict[str, Tensor | None] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        for name, options in CHOICES.items():
            self.model.save_pretrained(self.directory / name, **options)
        self.model.save_pretrained(self.directory / "given", state_dict=self.model.state_dict())
        self.model.model.save_pretrained(self.directory / "inner")
        self.expected = {name: gather_part(p) for name, p in self.model.named_parameters()}

    def on_validation_epoch_end(self) -> None:
        self.model.save_pretrained(self.directory / "validated")


def save(layout: str, directory: Path, tied: bool) -> dict[str, Tensor | None]:
    """Runs on each rank."""
    chosen = LAYOUTS[layout]
    module = Saving(directory, tied)
    run = make_trainer(chosen.make(), max_epochs=1, limit_train_batches=2)
    run.fit(module, batches(chosen.data_size), batches(chosen.data_size))
    return module.expected


LAYOUTS_HERE = ["ddp-2", "fsdp2-dp2", "fsdp2-dp2-tp2", "megatron3-dp2-tp2"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(LAYOUTS_HERE, "ddp-2", "fsdp2-dp2"))
def test_transformers_reads_what_was_written(layout: str, nursery: Nursery, tmp_path: Path) -> None:
    tied = layout.startswith("fsdp2")
    expected = Pool(nursery, LAYOUTS[layout].ranks).run(save, layout, tmp_path, tied, trainer=True)[0]
    for name in (*CHOICES, "given", "validated"):
        variant = CHOICES.get(name, {}).get("variant")
        found = LlamaForCausalLM.from_pretrained(tmp_path / name, variant=variant)
        values = dict(found.named_parameters())
        assert values.keys() == expected.keys()
        assert [key for key, value in values.items() if not value.equal(expected[key])] == [], name
    for name in ("other", "given"):
        assert load_file(tmp_path / name / "model.safetensors").keys() == expected.keys()  # a tie stands there once
    inner = LlamaForCausalLM.from_pretrained(tmp_path / "inner").model
    assert all(value.equal(expected[f"model.{key}"]) for key, value in inner.named_parameters())
    assert len(list((tmp_path / "variant").glob("model.fp16-0000?-of-*.safetensors"))) > 1
    assert (tmp_path / "variant/model.safetensors.index.fp16.json").exists()


class OnOneRank(Recorder):
    directory: Path

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.model.save_pretrained(self.directory)


def save_on_one_rank(directory: Path) -> None:
    module = OnOneRank()
    module.directory = directory
    run = make_trainer({"tp": 2, "timeout": timedelta(seconds=2)}, max_steps=2)
    run.fit(module, batches(1))


@pytest.mark.slow
def test_one_rank_alone_is_told(pool2: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 0 waits in save_pretrained for rank 1: the model lies on all ranks"):
        pool2.run(save_on_one_rank, tmp_path / "never", trainer=True)
    assert not (tmp_path / "never").exists()


def save_where_it_cannot(directory: Path) -> str:
    (directory / "file").write_text("")

    class Failing(Recorder):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.model.save_pretrained(directory / "file" / "below")

    run = make_trainer({"tp": 2}, max_steps=1)
    with pytest.raises((OSError, RuntimeError)) as caught:
        run.fit(Failing(), batches(1))
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(pool2: Pool, tmp_path: Path) -> None:
    first, second = pool2.run(save_where_it_cannot, tmp_path, trainer=True)
    assert "Not a directory" in first
    assert "save_pretrained failed on another rank" in second
    assert "Not a directory" in second


def whole_state(sizes: dict[str, int]) -> None:
    """Runs on each rank: rank 0 gets what one process has, of heads that tp does not divide, too."""
    model: nn.Module = tiny_model("llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize(model, build_mesh(resolve_sizes(2, **sizes), "cpu"), FSDP2Config())
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert {type(value) for value in found.values()} == {Tensor}


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_a_whole_state_dict(sizes: dict[str, int], pool2: Pool) -> None:
    pool2.run(whole_state, sizes)
