"""Code of users in the place of transformers', under its name (``functools.wraps``), and deeper than ``forward``."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from lightning_automodel.config import FSDP2Config
from lightning_automodel.modules.authors import links_of, place_of
from lightning_automodel.modules.forward import code_of
from lightning_automodel.plans.known_code import is_known, is_own_attention
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model
from tests.support.marks import with_long

BOUND = 1e-5
SCHEDULE = Schedule(steps=2)
STOCK = sdpa_attention.sdpa_attention_forward
Change = Callable[[Callable], Callable]


def centred(x: Tensor, dim: int) -> Tensor:
    """Subtracts a part of the mean of all heads."""
    return x - 0.5 * x.mean(dim, keepdim=True)


def over_heads(attend: Callable) -> Callable:
    def changed(*args: Any, **kwargs: Any) -> Any:
        output, weights = attend(*args, **kwargs)
        return centred(output, 2), weights

    return changed


def over_queries(rotate: Callable) -> Callable:
    def changed(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        return rotate(centred(q, 1), *args, **kwargs)

    return changed


def over_features(act: Callable) -> Callable:
    def changed(x: Tensor) -> Tensor:
        return act(x) / (1 + x.abs().amax(-1, keepdim=True))

    return changed


def over_hidden(forward: Callable) -> Callable:
    def changed(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(over_features(self.act_fn)(self.gate_proj(x)) * self.up_proj(x))

    return changed


def over_weights(forward: Callable) -> Callable:
    def changed(self: Any, hidden: Tensor, **others: Any) -> Tensor:
        return forward(self, hidden, **others) * (1 + self.mlp.up_proj.weight.mean())

    return changed


def over_tokens(forward: Callable) -> Callable:
    def changed(self: Any, x: Tensor) -> Tensor:
        return forward(self, x + 0.1 * x.cumsum(1))

    return changed


def over_keys(rotate: Callable) -> Callable:
    def changed(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        return rotate(q + 0.3 * q.cumsum(2), *args, **kwargs)

    return changed


def alike(function: Callable) -> Callable:
    return lambda *args, **kwargs: function(*args, **kwargs)


def under_its_name(change: Change, function: Callable) -> Callable:
    return functools.wraps(function)(change(function))


@contextmanager
def patched(owner: Any, name: str, change: Change, wrap: Callable = under_its_name) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, wrap(change, before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def registered(function: Callable) -> Iterator[None]:
    AttentionInterface.register("sdpa", function)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", STOCK)


def llama(attention: str = "eager", change: Callable[[Any], None] = lambda mlp: None) -> nn.Module:
    model: Any = tiny_model("llama", attention)
    for layer in model.model.layers:
        change(layer.mlp)
    return model


def act(function: Any) -> Callable[[], nn.Module]:
    def change(mlp: Any) -> None:
        del mlp.act_fn
        mlp.act_fn = function

    return functools.partial(llama, change=change)


def assign(mlp: Any) -> None:
    mlp.forward = functools.update_wrapper(functools.partial(over_hidden(LlamaMLP.forward), mlp), mlp.forward)


def bind(mlp: Any) -> None:
    product = under_its_name(
        lambda forward: lambda self, x: over_features(nn.Identity())(forward(self, x)), nn.Linear.forward
    )
    mlp.up_proj.forward = MethodType(product, mlp.up_proj)


def merging(self: Any, x: Tensor, *sizes: int) -> Tensor:
    return GPTJAttention._merge_heads(self, centred(x, 1), *sizes)


def gptj() -> nn.Module:
    model: Any = tiny_model("gptj")
    for layer in model.transformer.h:
        layer.attn._merge_heads = MethodType(merging, layer.attn)
    return model


class Attends:
    """An attention function that is an object."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return over_heads(STOCK)(*args, **kwargs)


Case = tuple[Callable[[], Any], Callable[[], nn.Module]]
NOTHING = functools.partial(patched, modeling_llama, "repeat_kv", lambda f: f)
SDPA = functools.partial(llama, "sdpa")


def replaced(owner: Any, name: str, change: Change, make: Callable[[], nn.Module] = llama) -> Case:
    return functools.partial(patched, owner, name, change), make


def attends(function: Callable) -> Case:
    return functools.partial(registered, function), SDPA


REFUSED: dict[str, Case] = {
    "sdpa": attends(under_its_name(over_heads, STOCK)),
    "sdpa, partial": attends(functools.partial(over_heads(STOCK))),
    "sdpa, object": attends(functools.update_wrapper(Attends(), STOCK)),
    "sdpa, decorated": attends(torch._dynamo.disable(under_its_name(over_heads, STOCK))),
    "eager": replaced(modeling_llama, "eager_attention_forward", over_heads),
    "named by eager": replaced(modeling_llama, "repeat_kv", lambda f: lambda x, n: centred(f(x, n), 1)),
    "rotation": replaced(modeling_llama, "apply_rotary_pos_emb", over_queries),
    "named by rotation": replaced(modeling_llama, "rotate_half", lambda f: lambda x: centred(f(x), 1)),
    "silu": replaced(functional, "silu", lambda f: lambda x, inplace=False: over_features(f)(x)),
    "forward of a class": replaced(LlamaMLP, "forward", over_hidden),
    "forward of a block": replaced(LlamaDecoderLayer, "forward", over_weights),
    "forward of a module": (NOTHING, functools.partial(llama, change=assign)),
    "forward of a linear layer": (NOTHING, functools.partial(llama, change=bind)),
    "method": (NOTHING, gptj),
    "activation": (NOTHING, act(under_its_name(over_features, functional.silu))),
    "activation, partial": (NOTHING, act(functools.partial(over_features(functional.silu)))),
    "activation of torch": (NOTHING, act(functools.partial(torch.softmax, dim=-1))),
}
EXACT: dict[str, Case] = {
    "sdpa": attends(under_its_name(alike, STOCK)),
    "rotation": replaced(modeling_llama, "apply_rotary_pos_emb", alike),
    "attention": replaced(LlamaAttention, "forward", alike),
    "feed-forward": replaced(LlamaMLP, "forward", alike),
    "block": replaced(LlamaDecoderLayer, "forward", alike),
    "tokens in norms": replaced(LlamaRMSNorm, "forward", over_tokens),
    "tokens in rotations": replaced(modeling_llama, "apply_rotary_pos_emb", over_keys),
}


def messages(cases: list[str], config: FSDP2Config) -> dict[str, str]:
    """Runs on each rank."""
    found = {}
    for name in cases:
        context, make = REFUSED[name]
        with context():
            try:
                found[name] = f"silent: {compare(make, {'tp': 2}, 2, SCHEDULE, config).largest}"
            except ValueError as error:
                found[name] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", with_long([False, True], False))
def test_users_code_under_a_librarys_name_is_tried(sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(messages, list(REFUSED), FSDP2Config(sequence_parallel=sequence_parallel)):
        expected = ("gives other numbers with", "computes across features")
        silent = {name: said for name, said in found.items() if not any(words in said for words in expected)}
        assert silent == {}


def errors(sizes: dict[str, int], config: FSDP2Config) -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    found = {}
    for name, (context, make) in EXACT.items():
        with context():
            found[name] = compare(make, sizes, 2, SCHEDULE, config).largest
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"),
    with_long([({"tp": 2}, True), ({"tp": 2}, False), ({"cp": 2}, False)], ({"tp": 2}, True)),
)
def test_what_it_does_right_is_exact(sizes: dict[str, int], sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(errors, sizes, FSDP2Config(sequence_parallel=sequence_parallel)):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def test_whose_code_it_is() -> None:
    mine = over_heads(STOCK)
    chains = [functools.wraps(STOCK)(mine), torch.no_grad()(mine), torch._dynamo.disable(mine)]
    for function in chains:
        assert mine.__module__ in map(place_of, links_of(function))
    for function in (*chains, functools.partial(mine), functools.update_wrapper(Attends(), STOCK)):
        with registered(function):
            assert not is_own_attention("sdpa")
    assert is_own_attention("sdpa")
    with patched(LlamaMLP, "forward", over_hidden):
        (mlp, *_) = [module for module in llama().modules() if isinstance(module, LlamaMLP)]
        assert place_of(code_of(mlp)) == __name__
        assert not is_known(mlp)
    assert is_known(mlp)
