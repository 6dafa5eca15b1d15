"""What models record of their layers under tp: attention maps and router logits of one process, each of them once."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.exactness.test_tasks_by_names import build
from tests.plans.support import BOUND, SCHEDULE
from tests.support.comparison import compare
from tests.support.families import tiny_model
from tests.support.training import whole

MAPS = ("llama", "opt", "gptj", "gpt_neo", "openai-gpt", "rembert", "xlm", "mvp")
"""Recorded by transformers; of blocks that are tried; collected by models of what layers return, in several depths."""
ENCODER_DECODERS = ("bart", "t5", "longt5")


def maps_of(model: nn.Module) -> list[Tensor]:
    return list(model.eval()(input_ids=torch.arange(3, 15).view(2, 6), output_attentions=True).attentions)


def errors_of_maps(names: tuple[str, ...], sequence_parallel: bool) -> dict[str, float]:
    """Runs on each rank: how far the maps of the first pass are from those of one process."""
    mesh, found = build_mesh(resolve_sizes(2, tp=2), "cpu"), {}
    for name in names:
        config = FSDP2Config(sequence_parallel=sequence_parallel)
        ours = maps_of(parallelize(tiny_model(name, "eager"), mesh, config))
        expected = maps_of(tiny_model(name, "eager"))
        assert [x.shape for x in ours] == [x.shape for x in expected], name
        found[name] = max(float((x - y).norm() / y.norm()) for x, y in zip(ours, expected, strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_attention_maps(sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(errors_of_maps, MAPS, sequence_parallel, timeout=120):
        assert max(found.values()) < BOUND, found


def all_maps_of(model: nn.Module) -> list[Tensor]:
    """Of an encoder, of a decoder, and of the decoder's attention to the encoder."""
    ids = torch.arange(3, 15).view(2, 6)
    output = model.eval()(input_ids=ids, labels=ids, output_attentions=True)
    return [x for name, maps in output.items() if name.endswith("attentions") for x in maps]


def errors_of_all_maps(names: tuple[str, ...]) -> dict[str, tuple[int, float]]:
    """Runs on each rank: how many maps there are, and how far they are from those of one process."""
    mesh, found = build_mesh(resolve_sizes(2, tp=2), "cpu"), {}
    for name in names:
        model = build("SEQ_TO_SEQ_CAUSAL_LM", name)
        expected = all_maps_of(copy.deepcopy(model))
        ours = all_maps_of(parallelize(model, mesh))
        assert [x.shape for x in ours] == [x.shape for x in expected], name
        errors = [float((x - y).norm() / y.norm()) for x, y in zip(ours, expected, strict=True)]
        found[name] = len(errors), max(errors)
    return found


@pytest.mark.slow
def test_maps_of_encoders_and_decoders(pool2: Pool) -> None:
    for found in pool2.run(errors_of_all_maps, ENCODER_DECODERS, timeout=120):
        assert all(count >= 6 and error < BOUND for count, error in found.values()), found


def gradients_of_maps(model: Any) -> dict[str, Tensor]:
    """Of a loss of attention maps, in which each number counts in its own way."""
    maps = all_maps_of(model) if model.config.is_encoder_decoder else maps_of(model)
    sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in maps).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def errors_of_losses(names: tuple[str, ...]) -> dict[str, Any]:
    """Runs on each rank: the largest error of a gradient, next to the largest of all, or the refusal."""
    mesh, found = build_mesh(resolve_sizes(2, tp=2), "cpu"), dict[str, Any]()
    for name in names:
        make = partial(build, "SEQ_TO_SEQ_CAUSAL_LM", name) if name in ENCODER_DECODERS else partial(tiny_model, name)
        expected = gradients_of_maps(make())
        try:
            ours = gradients_of_maps(parallelize(make(), mesh))
        except ValueError as refusal:
            found[name] = str(refusal)
            continue
        largest = max(x.norm() for x in expected.values())
        found[name] = max(float((ours[key] - x).norm() / largest) for key, x in expected.items() if key in ours)
        assert ours.keys() == expected.keys()
    return found


@pytest.mark.slow
def test_losses_of_maps(pool2: Pool) -> None:
    """Recorded, collected of what blocks return, and of what boundaries return beside their features."""
    names = ("llama", "rembert", "xlm", "gpt_neo", "gptj", "openai-gpt", "mvp", *ENCODER_DECODERS)
    for found in pool2.run(errors_of_losses, names, timeout=120):
        assert found.keys() == set(names)
        assert not [error for error in found.values() if isinstance(error, str) or error > BOUND], found


def routed(ran: bool) -> nn.Module:
    """A model that balances its experts, and that a user has run before it is split."""
    model: Any = tiny_model("mixtral")
    model.config.output_router_logits = True
    if ran:
        with torch.no_grad():
            model(input_ids=torch.arange(3, 12)[None])
    return model


def errors_of_routes(ran: bool) -> float:
    """Runs on each rank."""
    return compare(partial(routed, ran), {"tp": 2}, 2, SCHEDULE).largest[0]


@pytest.mark.parametrize("ran", [False, True])
def test_losses_of_routers(ran: bool, pool2: Pool) -> None:
    assert max(pool2.run(errors_of_routes, ran)) < BOUND


def doubled(router: nn.Module, args: tuple, output: Any) -> Any:
    """A hook of a user's: logits that are given alone, or the first of several outputs."""
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def by_logits(router: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A hook of a user's: scores of the recorded output."""
    return output[1].sigmoid() * (output[0] != 0), output[1]


def by_both(router: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A hook of a user's: scores of the recorded output and of the others."""
    return output[0] + 0.1 * by_logits(router, args, output)[0], output[1]


def hook_into(model: nn.Module, name: str, hook: Any) -> nn.Module:
    for place, module in model.named_modules():
        if place.endswith(name):
            module.register_forward_hook(hook)
    return model


def split_then_hooked(name: str, hook: Any, model: nn.Module, mesh: Any) -> nn.Module:
    for module in model.modules():
        for number, found in list(module._forward_hooks.items()):
            if found is hook:
                del module._forward_hooks[number]
    return hook_into(parallelize(model, mesh), name, hook)


def errors_of_hooks(family: str, name: str, hook: Any, before: bool = True) -> float | str:
    """Runs on each rank."""
    make = lambda: hook_into(tiny_model(family), name, hook)  # noqa: E731
    later = None if before else partial(split_then_hooked, name, hook)
    try:
        return compare(make, {"tp": 2}, 2, SCHEDULE, make_parallel=later).largest[0]
    except ValueError as refusal:
        return str(refusal)


ROUTER, GATE = ("llama4_text", "feed_forward.router"), ("deepseek_v3", "mlp.gate")
CHANGES = [(*ROUTER, doubled, True), (*ROUTER, by_logits, True), (*ROUTER, by_both, False), (*GATE, doubled, True)]


def test_hooks_change_what_routers_give(pool2: Pool) -> None:
    """Scores, of scores and of recorded logits; of both when the model is parallel."""
    for case in CHANGES:
        for error in pool2.run(errors_of_hooks, *case):
            assert isinstance(error, float), error
            assert error < BOUND


def test_hooks_that_make_outputs_of_recorded_logits_and_others_are_refused(pool2: Pool) -> None:
    for said in pool2.run(errors_of_hooks, *ROUTER, by_both):
        assert "output of model.layers.0.feed_forward.router (Llama4Router) of its router logits and of" in str(said)
