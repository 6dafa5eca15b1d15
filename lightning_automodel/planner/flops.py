"""Counts the floating-point operations that training needs: so many per token, so many per pair of tokens.

::

    a document of n tokens    per token x n  +  sum over layers of  per pair x n x min(n, window)
    dense, full attention     6 N n  +  12 L H n^2        (N weights of matrices, L layers, H = heads x size of a head)

The second line is that of PaLM (appendix B) and of Megatron-LM: what a causal mask hides counts too. It is not written
down for each family: a forward pass of the model itself, on tensors without memory, is counted by torch's formulas at
two lengths, and checked at a third. Of each product one more is counted for every factor that requires a gradient, as
autograd does: a frozen weight has none. Experts count where tokens go. Recomputation does not count.
"""

import copy
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from lightning_automodel._compat.fake.ranks import fake_device
from lightning_automodel._compat.torch.tensors import EagerMode, name_of_operation
from lightning_automodel._compat.transformers.models import use_kernels_with_formulas
from lightning_automodel.modules.structure import find_blocks, keep_no_cache, text_config
from lightning_automodel.planner.formulas import formula_of
from lightning_automodel.planner.layers import MOST_KINDS, Kinds, cut_model, kinds_of

_LENGTHS = (32, 64, 96)
_LAYERS = 2
"""Of each kind that are run: nothing before the first one may need a gradient, and the others are alike."""
_ADDS = ("addmm", "baddbmm")
"""Products whose first argument is added and not multiplied."""

Window = int | None


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """What training a model costs, forward and backward.

    Attributes:
        per_token: floating-point operations that every token needs.
        per_pair: those of each token with each token that it may see, by the window of the layers; ``None``: the whole
            document.
    """

    per_token: float
    per_pair: Mapping[Window, float] = field(default_factory=dict)

    def of(self, tokens: float, pairs: Mapping[Window, float]) -> float:
        """Count the operations of so many tokens and pairs."""
        return self.per_token * tokens + sum(cost * pairs[window] for window, cost in self.per_pair.items())

    def of_documents(self, lengths: Iterable[int]) -> float:
        """Count the operations of documents of these lengths, each of which sees only itself."""
        lengths = list(lengths)
        pairs = {window: sum(n * min(n, window or n) for n in lengths) for window in self.per_pair}
        return self.of(sum(lengths), pairs)


def windows_of(model: nn.Module) -> list[Window]:
    """List the different windows of the layers of ``model``, as its config has them."""
    found = {window_of(model, name) for name in find_blocks(model)}
    return sorted(found, key=lambda window: window or 0) or [None]


def window_of(model: nn.Module, block: str) -> Window:
    """Return how many tokens back the attention of a block sees; ``None``: all."""
    config, number = text_config(model), block.rpartition(".")[2]
    kinds = getattr(config, "layer_types", None)
    if kinds and number.isdigit() and int(number) < len(kinds):
        sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        return getattr(config, sizes.get(kinds[int(number)], ""), None)
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and getattr(config, "use_sliding_window", True) else None


def count_model(model: nn.Module) -> ModelFlops:
    """Count what training ``model`` costs. No process group is needed, and none is used.

    Args:
        model: a language model on the meta device, which stays as it is; what is frozen does not require gradients.

    Raises:
        ValueError: if the operations of a document are no sum over its tokens and pairs of them (state spaces).
    """
    kinds = kinds_of(model)
    cut, times, windows = _few_layers(model, kinds)
    counts = _count_rows(cut)
    per_token, per_pair = 0.0, Counter[Window]()
    for place in set().union(*counts):
        one, two, three = (count[place] for count in counts)
        short, medium, long = _LENGTHS
        pair = (two / medium - one / short) / (medium - short)
        token = one / short - pair * short
        if abs(token * long + pair * long**2 - three) > 1e-9 * three:
            raise ValueError(f"the operations of {type(model).__name__} are no sum over tokens and pairs of tokens")
        per_token += times.get(place, 1) * token
        per_pair[windows.get(place)] += times.get(place, 1) * pair  # type: ignore[assignment]
    return ModelFlops(per_token=per_token, per_pair={window: cost for window, cost in per_pair.items() if cost})


def _few_layers(model: nn.Module, kinds: Kinds) -> tuple[nn.Module, dict[str, int], dict[str, Window]]:
    """Cut ``model`` to few layers of each kind; return it, for how many each block stands, and its window."""
    blocks = [name for names in kinds.names for name in names]
    if kinds.owner is None or len(kinds.names) > MOST_KINDS:
        return copy.deepcopy(model), {}, {name: window_of(model, name) for name in blocks}
    by_window = [part for names in kinds.names for part in _by_window(model, names)]
    kinds = Kinds(by_window, kinds.owner)
    counts = [min(_LAYERS, len(names)) for names in by_window]
    kept = {name: 1 for names in by_window for name in names[:_LAYERS]}
    kept |= {names[_LAYERS - 1]: len(names) - _LAYERS + 1 for names in by_window if len(names) > _LAYERS}
    order = sorted(kept, key=lambda name: int(name.rpartition(".")[2]))
    places = {name: f"{kinds.owner}.{i}" for i, name in enumerate(order)}
    times = {places[name]: count for name, count in kept.items()}
    return cut_model(model, kinds, counts), times, {places[name]: window_of(model, name) for name in kept}


def _by_window(model: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Part blocks that only a list of the config tells apart."""
    found: dict[Window, list[str]] = {}
    for name in names:
        found.setdefault(window_of(model, name), []).append(name)
    return list(found.values())


def _count_rows(model: nn.Module) -> list[Counter[str]]:
    """Count the operations of a row of each of the lengths, by the block that they belong to."""
    twin, counter = copy.deepcopy(model).train(), _Counter()
    for part in twin.modules():
        use_kernels_with_formulas(getattr(part, "config", None))
    for name, block in find_blocks(twin).items():
        block.register_forward_pre_hook(lambda *_, name=name: counter.enter(name))
        block.register_forward_hook(lambda *_: counter.enter(""))
    counts = []
    with _without_memory(), counter:
        twin.to_empty(device="cpu")
        for length in _LENGTHS:
            twin(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
            counts.append(counter.take())
    return counts


@contextmanager
def _without_memory() -> Generator[None, None, None]:
    """Make tensors without memory within this context, and attention of products that have formulas."""
    with sdpa_kernel(SDPBackend.MATH), fake_device("cpu"):
        yield


class _Counter(EagerMode):
    """Counts forward operations, and those of the backward pass that each will cause."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()
        self._place = ""

    def enter(self, place: str) -> None:
        """Count what follows to ``place``."""
        self._place = place

    def take(self) -> Counter[str]:
        """Return what was counted since the last call, by place."""
        taken, self._counts = self._counts, Counter()
        return taken

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := formula_of(func)) is not None:
            first = name_of_operation(func).rpartition("::")[2] in _ADDS
            factors = [x for x in args[first:][:2] if isinstance(x, Tensor)]
            flops = formula(*args, **(kwargs or {}), out_val=out)
            self._counts[self._place] += flops * (1 + sum(x.requires_grad for x in factors))
        return out


# ---- the model of a run ----------------------------------------------------------------------------------------------


def find_model(module: nn.Module) -> nn.Module | None:
    """Find the outermost model of transformers in ``module``, with the adapters around it; ``None``: there is none."""
    return next((m for m in module.modules() if isinstance(m, PreTrainedModel) or hasattr(m, "get_base_model")), None)


def whole_twin(model: nn.Module) -> nn.Module:
    """Build ``model``, which may be sharded and split, once more from its config: whole, on the meta device.

    Args:
        model: from :func:`find_model`. What is frozen there is frozen in the twin, which keeps no keys and values.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    kind: Any = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
    config = copy.deepcopy(base.config)
    keep_no_cache(config)
    with torch.device("meta"):
        twin: Any = kind(config)
        for adapter in getattr(model, "peft_config", {}).values():
            from peft import get_peft_model

            twin = get_peft_model(twin, copy.deepcopy(adapter))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return twin
