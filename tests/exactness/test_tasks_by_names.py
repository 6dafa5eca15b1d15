"""Every kind of transformers that classifies or translates, split by the names of its layers: each gradient at tp=2.

``make test-long PYTEST_ARGS="-k tasks_by_names -rP"`` lists them.
"""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForAudioClassification,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans.published import published_plan
from lightning_automodel.plans.selection import known_rules
from lightning_automodel.testing.pool import Pool
from tests.support.families import MOST_PARAMETERS, tiny_config

NO_SUBJECT = re.compile(
    "computes neither transformers' loss nor torch's cross entropy|publishes no tensor-parallel plan"
)
BOUND, LENGTH, LABELS, SIDE, SAMPLES = 1e-4, 13, 3, 32, 4000
TASKS: dict[str, type] = {
    "SEQUENCE_CLASSIFICATION": AutoModelForSequenceClassification,
    "MASKED_LM": AutoModelForMaskedLM,
    "SEQ_TO_SEQ_CAUSAL_LM": AutoModelForSeq2SeqLM,
    "IMAGE_CLASSIFICATION": AutoModelForImageClassification,
    "AUDIO_CLASSIFICATION": AutoModelForAudioClassification,
}


def kinds(task: str) -> list[str]:
    """Model types of a task."""
    return [name for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") if name in CONFIG_MAPPING]


def build(task: str, kind: str) -> nn.Module:
    """A tiny model in evaluation mode, without dropout; vectors are not what they are drawn as."""
    config = tiny_config(kind)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs or {})):
        if isinstance(part, PreTrainedConfig):
            _shrink(part)
    if _size(task, config) > MOST_PARAMETERS:
        _shrink_stages(config)
    if (size := _size(task, config)) > MOST_PARAMETERS:
        raise RuntimeError(f"{kind}: {size} parameters")
    torch.manual_seed(0)
    model = _from(task, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1 or not parameter.any():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.eval()


def _from(task: str, config: PreTrainedConfig) -> nn.Module:
    return TASKS[task].from_config(config, attn_implementation="eager", dtype=torch.float32)  # type: ignore[attr-defined]


def _size(task: str, config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in _from(task, config).parameters())


def _shrink_stages(config: Any) -> None:
    """Leave one block to each stage, and few features."""
    for name, values in list(vars(config).items()):
        if name in ("depths", "hidden_sizes") and isinstance(values, list | tuple):
            setattr(config, name, [1 if name == "depths" else 16 << stage for stage in range(len(values))])
    if isinstance(getattr(config, "embed_dim", None), int):
        config.embed_dim = 16


def _shrink(config: Any) -> None:
    if isinstance(getattr(config, "image_size", None), int):
        config.image_size = SIDE
    if isinstance(getattr(config, "patch_size", None), int):
        config.patch_size = min(config.patch_size, 8)
    config.num_labels, config.use_cache = LABELS, False
    for name in ("pad_token_id", "decoder_start_token_id"):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)


def batch_of(task: str, model: Any) -> dict[str, Tensor]:
    """Two rows of what a model reads, and their labels."""
    draw = torch.Generator().manual_seed(0)
    ids, classes = torch.randint(3, 100, (2, LENGTH), generator=draw), torch.tensor([0, 2])
    end = getattr(model.config, "eos_token_id", None)
    if isinstance(end, int) and end < 100:
        ids[:, -1] = end
    if task == "IMAGE_CLASSIFICATION":
        return {"pixel_values": torch.randn(2, 3, SIDE, SIDE, generator=draw), "labels": classes}
    if task == "AUDIO_CLASSIFICATION":
        return {model.main_input_name: torch.randn(2, SAMPLES, generator=draw), "labels": classes}
    return {"input_ids": ids, "labels": classes if task == "SEQUENCE_CLASSIFICATION" else ids.flip(1)}


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss and every gradient."""
    loss = model(**batch).loss
    loss.backward()
    found = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def compared(task: str, names: list[str], sizes: dict[str, int], config: dict[str, Any]) -> dict[str, float | str]:
    """Runs on each rank: of each kind the largest error, or that of a pass; others are no subject.

    Left out are those that cannot be built so small, or do not take such a batch on one process.
    """
    mesh = build_mesh(resolve_sizes(torch.distributed.get_world_size(), **sizes), "cpu")
    found: dict[str, float | str] = {}
    for name in names:
        try:
            model = build(task, name)
            batch = batch_of(task, model)
            many, one = copy.deepcopy(model), gradients(model, batch)
        except Exception:  # of its own, whatever it is
            continue
        try:
            found[name] = _error(gradients(parallelize(many, mesh, FSDP2Config(**config)).eval(), batch), one)
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error; a gradient that is rounding beside all of them counts as none."""
    noise = 1e-6 * torch.stack([x.norm() for x in expected.values()]).norm()
    errors = [(found[n] - x).norm() / x.norm() for n, x in expected.items() if (found[n] - x).norm() > noise]
    return float(max(errors, default=torch.zeros(())))


def is_split_by_names(task: str, name: str) -> bool:
    """Tell whether a kind publishes no plan, and has such layers."""
    try:
        with torch.device("meta"):
            model = _from(task, tiny_config(name))
    except Exception:  # of its own, whatever it is
        return False
    return not published_plan(model) and bool(known_rules(model))


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_all_kinds_are_exact(task: str, pool2: Pool) -> None:
    names = [name for name in kinds(task) if is_split_by_names(task, name)]
    (found, _) = pool2.run(compared, task, names, {"tp": 2}, {}, timeout=900)
    print(f"{task}: {len(found)} of {len(names)} kinds compared: {', '.join(found)}")
    assert len(found) >= 0.75 * len(names)  # others are larger, or read another batch
    assert {name: error for name, error in found.items() if isinstance(error, str) or error > BOUND} == {}


@pytest.mark.long
@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
@pytest.mark.parametrize("task", ["MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"])
def test_all_losses_in_chunks_are_exact(task: str, axis: str, pool2: Pool) -> None:
    """Told by an error are losses of other kinds, and IBert under tp."""
    (found, _) = pool2.run(compared, task, kinds(task), {axis: 2}, {"chunked_loss": 7}, timeout=900)
    kept = {name: error for name, error in found.items() if not isinstance(error, str) or not NO_SUBJECT.search(error)}
    print(f"{task}: {len(kept)} of {len(kinds(task))} kinds compared: {', '.join(kept)}")
    assert len(kept) >= 0.75 * len(kinds(task))
    assert {name: error for name, error in kept.items() if isinstance(error, str) or error > BOUND} == {}
