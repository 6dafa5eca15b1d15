"""Who reads the files of a pretrained model: every rank, one replica for all, or nobody if a checkpoint follows."""

import copy
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.modeling_utils as library
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightning_automodel import FSDP2Config, FSDP2TPStrategy, parallelize
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.loading import initialize, sharded_loading
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Pool
from tests.support.training import Recorder, batches, fit, make_trainer, tiny_llama, whole_parameters


class Reads:
    """Counts how often transformers reads weights from files, on this rank."""

    def __init__(self) -> None:
        self.count = 0
        original = library.convert_and_load_state_dict_in_model

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        library.convert_and_load_state_dict_in_model = counted


class Messages(logging.Handler):
    """Keeps what transformers says when it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("transformers.modeling_utils").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Pretrained(Recorder):
    def __init__(self, directory: Path, head: type = AutoModelForCausalLM) -> None:
        super().__init__()
        self.directory = directory
        self.head = head

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(7 + dist.get_rank())
            self.model = self.head.from_pretrained(self.directory)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def build(module: Recorder, **arguments: Any) -> dict[str, Tensor]:
    """The parameters at the start of a run."""
    make_trainer(FSDP2TPStrategy(**arguments), max_steps=0).fit(module, batches(1))
    return whole_parameters(module)


def differing(module: nn.Module) -> list[str]:
    values = dict(tiny_llama().named_parameters())
    return [name for name, p in whole_parameters(module.model).items() if not torch.equal(p, values[name])]


# ---- replicas --------------------------------------------------------------------------------------------------------


def by_broadcast(directory: Path) -> dict[str, Any]:
    reads, messages = Reads(), Messages()
    sizes = {"dp_replicate": 2, "tp": 2}
    config = FSDP2Config(broadcast_weights=True)
    module = Pretrained(directory)
    build(module, **sizes, config=config)
    with_a_new_head = [Pretrained(directory, AutoModelForSequenceClassification) for _ in range(2)]
    heads = [
        build(m, **sizes, config=c)["model.score.weight"] for m, c in zip(with_a_new_head, (config, None), strict=True)
    ]
    return {"differing": differing(module), "reads": reads.count, "said": messages.texts, "heads": heads}


@pytest.mark.slow
def test_one_replica_reads_for_all(pool4: Pool, saved: Path) -> None:
    results = pool4.run(by_broadcast, saved, trainer=True)
    assert [result["differing"] for result in results] == [[]] * 4
    assert [result["reads"] for result in results] == [3, 3, 1, 1]  # the last model is read by all
    head = results[0]["heads"][0]
    assert head.std() > 0
    assert all(torch.equal(head, result["heads"][0]) for result in results)
    reports = [sum("score.weight" in text for text in result["said"]) for result in results]
    assert reports == [2, 0, 0, 0]  # rank 0 says once per model what was missing


# ---- resuming --------------------------------------------------------------------------------------------------------


class Partial(Pretrained):
    """Leaves out what it can read again."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in [name for name in checkpoint["state_dict"] if "norm" in name]:
            del checkpoint["state_dict"][name]


def resumed(model: Path, directory: Path) -> dict[str, Any]:
    expected = fit({"tp": 2}, directory / "a", epochs=2, module=Pretrained(model))[1]
    reads = Reads()
    module = Pretrained(model)
    path = directory / "a/epoch=0.ckpt"
    actual = fit({"tp": 2}, directory / "b", epochs=2, resume=path, module=module)[1]
    while_resuming = reads.count
    fit({"tp": 2}, directory / "c", epochs=1, module=Partial(model))
    partial = Partial(model)
    fit({"tp": 2}, directory / "d", epochs=2, resume=directory / "c/epoch=0.ckpt", module=partial)
    return {
        "equal": all(torch.equal(actual[name], value) for name, value in expected.items()),
        "tied": module.model.lm_head.weight is module.model.model.embed_tokens.weight,
        "reads": (while_resuming, reads.count - while_resuming),
    }


@pytest.mark.slow
def test_a_resume_does_not_read_the_base_weights(pool2: Pool, saved: Path) -> None:
    """Unless the checkpoint leaves some of them out."""
    for result in pool2.run(resumed, saved, saved.parent, trainer=True):
        assert result == {"equal": True, "tied": True, "reads": (0, 2)}


class OnMeta(Recorder):
    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = tiny_llama()


def resumed_on_meta(directory: Path) -> tuple[bool, int]:
    expected = fit({"tp": 2}, directory / "a", epochs=2, module=OnMeta())[1]
    path = directory / "a/epoch=0.ckpt"
    drawn = 0
    original = initialize.initialize_missing

    def counted(model: nn.Module, *args: Any) -> None:
        nonlocal drawn
        drawn += sum(not getattr(p, "_is_hf_initialized", False) for p in model.parameters())
        original(model, *args)

    initialize.initialize_missing = counted
    actual = fit({"tp": 2}, directory / "b", epochs=2, resume=path, module=OnMeta())[1]
    return all(torch.equal(actual[name], value) for name, value in expected.items()), drawn


@pytest.mark.slow
def test_a_resume_draws_no_random_weights(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(resumed_on_meta, tmp_path, trainer=True) == [(True, 0)] * 2


# ---- pickled files ---------------------------------------------------------------------------------------------------


def from_pickle(directory: Path) -> list[str]:
    module = Pretrained(directory)
    expectation = pytest.warns(UserWarning, match=r"pytorch_model\.bin is a pickled file")
    with expectation if os.environ["RANK"] == "0" else nullcontext():
        build(module, tp=2)
    return differing(module)


def test_pickled_weights_are_read_with_a_warning(pool2: Pool, saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    torch.save(tiny_llama().state_dict(), saved / "pytorch_model.bin")
    assert pool2.run(from_pickle, saved, trainer=True) == [[], []]


def copied_from_pickle(sizes: dict[str, int], directory: Path) -> list[str]:
    """Runs on each rank: parameters whose memory is more than their shard, and those that a copy does not have."""
    mesh = build_mesh(resolve_sizes(2, **sizes), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), torch.device("cpu")):
        model = AutoModelForCausalLM.from_pretrained(directory)
    shards = {name: local_tensor(p) for name, p in model.named_parameters()}
    found = [name for name, shard in shards.items() if shard.untyped_storage().nbytes() > 1.5 * shard.nbytes]
    copies = {name: local_tensor(copy.deepcopy(p)) for name, p in model.named_parameters()}
    return found + [name for name, shard in copies.items() if not shard.equal(shards[name])]


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_what_a_pickled_file_gives_has_memory_of_its_own(sizes: dict[str, int], pool2: Pool, saved: Path) -> None:
    """As modules_to_save of peft asks for, which copies them."""
    (saved / "model.safetensors").unlink()
    torch.save(tiny_llama().state_dict(), saved / "pytorch_model.bin")
    assert pool2.run(copied_from_pickle, sizes, saved) == [[], []]
