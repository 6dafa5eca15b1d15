"""Says what a run needs before it is started: from a model's config and a layout to memory, communication and time."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedConfig

from lightning_automodel.finetuning.adapters import (
    adapter_config,
    add_adapter,
    freeze,
    refuse_saved_prompt,
    report_trainable,
)
from lightning_automodel.finetuning.causal_lm import CausalLM
from lightning_automodel.finetuning.image_text import ImageTextLM
from lightning_automodel.finetuning.pretrained import Pretrained, loads, refuse_encoder_decoder
from lightning_automodel.finetuning.trust import trusts
from lightning_automodel.modules.four_bit import count_weights
from lightning_automodel.modules.structure import keep_no_cache, text_config
from lightning_automodel.planner.estimate import Estimate, estimate
from lightning_automodel.planner.hardware import HARDWARE, Hardware
from lightning_automodel.planner.layers import extrapolate
from lightning_automodel.planner.play import Run, play, stage
from lightning_automodel.planner.watch import Watched
from lightning_automodel.plans.counts import listed
from lightning_automodel.plans.validation import counts_of_config

RESERVE = 0.06
"""Share of the memory that the driver, NCCL and gaps between blocks of the allocator take; assumed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one optimizer step of a run does on rank 0, and what follows from it.

    Attributes:
        run: what was planned.
        hardware: on what.
        name: of the model's class.
        parameters: of the whole model, tied ones once.
        trainable: those of them that train.
        watched: memory, collectives and FLOPs of the step.
        basis: how many layers were run to know that.
        estimate: times and cost.
        warnings: what a user should look at.
    """

    run: Run
    hardware: Hardware
    name: str
    parameters: int
    trainable: int
    watched: Watched
    basis: str
    estimate: Estimate
    warnings: list[str]

    @property
    def phase(self) -> str:
        """Name the phase with the most memory."""
        return max(self.watched.peaks, key=lambda phase: sum(self.watched.peaks[phase].values()))

    @property
    def peak(self) -> int:
        """Count the bytes of the device at the worst moment of a step."""
        return sum(self.watched.peaks[self.phase].values())

    @property
    def fits(self) -> bool:
        """Tell whether the device has that much, beside :data:`RESERVE`."""
        return self.peak <= self.hardware.memory * (1 - RESERVE)


def plan(model: str | PreTrainedConfig | nn.Module, run: Run, hardware: Hardware = HARDWARE["h100"]) -> Plan:
    """Plan ``run``: play its first rank in this process, on tensors without memory. No weights are read.

    Args:
        model: name or directory of a model, its config, or a model on the meta device, which stays as it is.
        run: layout, switches and sizes of a step.
        hardware: for memory, time and cost.

    Raises:
        ValueError: if the layout does not fit the model, as the run itself would say it.
        RuntimeError: if an operation of the model meets tensors on two devices, or this process has process groups.
    """
    if run.config.enable_compile:
        raise ValueError(
            "enable_compile=True: the planner runs eager blocks; plan without it, an upper bound of memory"
        )
    built = model if isinstance(model, nn.Module) else build(model)
    with stage(run) as mesh:
        watched, basis = extrapolate(built, lambda cut: play(cut, run, mesh))
    found = plan_of(built, run, hardware, watched, basis)
    found.warnings.extend(_warnings(found, built))
    return found


def plan_of(model: nn.Module, run: Run, hardware: Hardware, watched: Watched, basis: str) -> Plan:
    """Make a plan, without warnings, of what was watched of a step."""
    return Plan(
        run=run,
        hardware=hardware,
        name=type(model).__name__,
        parameters=count_weights(model),
        trainable=count_weights(model, trainable=True),
        watched=watched,
        basis=basis,
        estimate=estimate(watched, run, hardware),
        warnings=[],
    )


def build(
    model: str | PathLike[str] | PreTrainedConfig,
    peft: Any = None,
    frozen: Iterable[str] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Make a causal language model, or one that reads images and writes text, on the meta device, from its config.

    Args:
        model: name or directory of a model, or of an adapter, or the config of a model.
        peft: adapters, as ``CausalLM(peft=...)`` takes them.
        frozen: patterns of what does not train, as ``CausalLM(freeze=...)`` takes them.
        kwargs: ``CausalLM(model_kwargs=...)``, of which those count that change the config or say where to look.

    Raises:
        ValueError: if there is no config of this name, or it belongs to another kind of model, or has no such layers,
            or is an adapter beside ``peft``, or a saved prompt, which does not train on.
    """
    if isinstance(model, str | PathLike):
        found = Pretrained.of(model)
        (config, _), peft = found.find_config(kwargs or {}), found.added(peft)
        refuse_encoder_decoder(found.model, config)
    else:
        config = model
    refuse_saved_prompt(peft)
    keep_no_cache(config)
    with torch.device("meta"):
        built = _auto_class(config).from_config(config, trust_remote_code=trusts(kwargs))
        built = built.to("meta")  # some constructors draw where no device is asked
        adapted = built if peft is None else add_adapter(built, adapter_config(peft))
    freeze(adapted, frozen)
    report_trainable(adapted, f"peft={peft}, freeze={list(frozen)}")
    return adapted


def _auto_class(config: PreTrainedConfig) -> Any:
    """Find who builds the model that ``CausalLM`` or ``ImageTextLM`` would train."""
    for kind in (ImageTextLM, CausalLM):
        if loads(kind.auto_class, kind.known_configs, config):
            return kind.auto_class
    raise ValueError(
        f"{type(config).__name__}: plan builds models that write text, and those that read images as well; build "
        "another on the meta device, and give it to lightning_automodel.planner.plan(model, run)"
    )


def _warnings(found: Plan, model: nn.Module) -> Iterator[str]:
    sizes, hardware, config = found.run.sizes, found.hardware, text_config(model)
    if not found.fits:
        yield (
            f"does not fit: {found.peak / 2**30:.1f} GiB in the phase {found.phase!r}, and a {hardware.name} has "
            f"{hardware.memory / 2**30:.1f} GiB, of which about {RESERVE:.0%} are not for tensors"
        )
    if sizes.tp > hardware.devices or hardware.devices % sizes.tp:
        yield f"tp={sizes.tp} crosses nodes of {hardware.devices}: its collectives wait for the network in every layer"
    counts = dict.fromkeys(counts_of_config(config))
    if uneven := [count for count in counts if not count.allows(sizes.tp)]:
        yield f"tp={sizes.tp} does not divide {listed(uneven)}: each rank computes all heads of attention"
    heads = min((count.parts for count in counts if count.shared), default=sizes.tp)
    if heads < sizes.tp and not uneven:
        times = sizes.tp // heads
        yield f"tp={sizes.tp} is more than num_key_value_heads={heads}: keys and values are computed {times} times"
    words = getattr(config, "vocab_size", None)
    if isinstance(words, int) and words % sizes.tp:
        yield f"tp={sizes.tp} does not divide vocab_size={words}: shards of the vocabulary differ by a row"
    if type(getattr(model, "config", None)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        yield "rows are of text only: what reads images counts as parameters, and its passes are not planned"
    if sizes.ep > 1:
        yield f"ep={sizes.ep}: routers are planned even; rows, memory and time of experts grow by train/expert_load"
    if found.run.sequence_length % (sizes.tp * sizes.cp * 2):
        yield f"sequence_length={found.run.sequence_length} is no multiple of 2 x cp x tp: slices are padded"
