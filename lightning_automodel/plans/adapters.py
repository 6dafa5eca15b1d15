"""Adapters: the plan sees a model without its wrappers, and what they add follows the layer that they wrap.

The collectives of a layer surround its wrapper, so all that is inside computes with what a rank has, and a parameter is
cut where one of its dims is the input or the output of the layer::

    the layer                   lora_A [r, in]           lora_B [out, r]       magnitude, ia3_l [out, 1]
    --------------------------  -----------------------  --------------------  -------------------------
    rows (output) are cut       whole, partial gradient  rows, as the layer    rows, as the layer
    columns (input) are cut     columns, as the layer    whole, partial gr.    whole, partial gradient
    whole, or rows of a table   as the layer: whole      whole                 whole
"""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_automodel._compat.dtensor.tensors import StridedShard, strided_shard
from lightning_automodel._compat.torch.modules import own_children
from lightning_automodel.modules.four_bit import four_bit_layers
from lightning_automodel.modules.matrices import is_turned
from lightning_automodel.modules.wrappers import STEPS, is_wrapper, name_without_wrappers, unwrapped


@dataclass(frozen=True)
class Role:
    """Which dim of an adapter's parameter is the input of the wrapped layer, and which its output."""

    of_input: int | None = None
    of_output: int | None = None


ROLES: dict[str, Role] = {
    "lora_A": Role(of_input=1),
    "lora_B": Role(of_output=0),
    "lora_embedding_A": Role(of_input=1),
    "lora_embedding_B": Role(of_output=0),
    "lora_magnitude_vector": Role(of_output=0),
    "ia3_l": Role(of_input=1, of_output=0),
}
"""By the attribute of the wrapper that holds them. What is not here is right on layers that stay whole only."""

_VARIANTS = ("DoraLinearVariant",)
"""Forms of LoRA that compute something else with the same parameters, and are right on slices."""


def unknown_variants(wrapper: nn.Module) -> list[str]:
    """List the forms of LoRA in ``wrapper`` of which nothing is known: they may look at other features, or tokens."""
    variants = [type(variant).__name__ for variant in getattr(wrapper, "lora_variant", {}).values()]
    return [name for name in variants if name not in _VARIANTS]


def wrapper_of(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """Returns the innermost wrapper that holds the parameter or module ``name``, with its name."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:end])
        module = model.get_submodule(prefix)
        if is_wrapper(module):
            return prefix, module
    return None


@dataclass(frozen=True)
class Wrapped:
    """An adapter's parameter and the one that it adapts.

    Attributes:
        name: of the adapter's parameter.
        wrapper: that holds it.
        base: name of the adapted parameter in the model without wrappers.
    """

    name: str
    wrapper: nn.Module
    base: str

    @classmethod
    def of(cls, model: nn.Module, name: str) -> "Wrapped":
        """Find the adapted parameter that the adapter's parameter ``name`` belongs to."""
        found = wrapper_of(model, name)
        assert found is not None, name
        prefix, wrapper = found
        return cls(name, wrapper, f"{name_without_wrappers(prefix)}.{getattr(wrapper, 'parameter_name', 'weight')}")

    def cut(self, placement: Placement, shape: tuple[int, ...]) -> Placement:
        """Derive the placement of this parameter of ``shape`` where the adapted one is cut as ``placement`` says.

        Raises:
            ValueError: if that is not known.
        """
        role = self.role
        dim = role.of_input if self.cuts_input(placement) else role.of_output
        if dim is None or dim >= len(shape) or shape[dim] == 1 or self.takes_rows(placement):
            return Replicate()
        return strided_shard(dim, int(placement.split_factor)) if isinstance(placement, StridedShard) else Shard(dim)

    def takes_rows(self, placement: Placement) -> bool:
        """Tell whether the layer is a table that is cut on its rows: ranks look up together before adapters add."""
        return self._looks_up and self.cuts_input(placement)

    def cuts_input(self, placement: Placement) -> bool:
        """Tells whether ``placement`` cuts the adapted parameter on the dim of its input."""
        layer = unwrapped(self.wrapper)
        ndim = layer.get_parameter(self.base.rpartition(".")[2]).ndim
        is_stacked_turned = ndim > 2 and getattr(layer, "is_transposed", False)
        if not isinstance(placement, Shard | StridedShard):
            return False
        return placement.dim == ndim - (2 if self._looks_up or is_stacked_turned or is_turned(layer) else 1)

    @property
    def _looks_up(self) -> bool:
        """Tell whether factors look up as the table does; those of ``target_parameters`` are added to its values."""
        return isinstance(unwrapped(self.wrapper), nn.Embedding) and not hasattr(self.wrapper, "parameter_name")

    @property
    def normalizes_rows(self) -> bool:
        """Tell whether this is DoRA's magnitude, which replaces the norms of the rows of the whole matrix."""
        return self._attribute == "lora_magnitude_vector"

    @property
    def role(self) -> Role:
        """Look up the role of this parameter.

        Raises:
            ValueError: if it has none that is known.
        """
        unknown = unknown_variants(self.wrapper) or [self._attribute] * (self._attribute not in ROLES)
        if unknown:
            raise ValueError(self.unknown(unknown[0]))
        return ROLES[self._attribute]

    @property
    def _attribute(self) -> str:
        return next(part for part in reversed(self.name.split(".")) if part in own_children(self.wrapper))

    def unknown(self, what: str = "") -> str:
        """Say that nothing tells how this parameter is split, and the ways out."""
        kind = type(self.wrapper)
        return (
            f"{what or self._attribute} of {self.name} ({kind.__module__}.{kind.__name__}): tensor parallelism splits "
            f"{self.base}, and how this is split with it is not known; use LoRA, DoRA on linear layers or IA3 "
            f"(parameters {', '.join(ROLES)}), leave the layer out of what is adapted, or use tp=1 with dp_shard"
        )


_ON_FOUR_BITS = ("lora_A", "lora_B", "ia3_l")


def check_four_bit(model: nn.Module) -> None:
    """Check that what adapts layers of four bits asks them for nothing but their output.

    Raises:
        ValueError: naming the layer, its adapter and what to use.
    """
    layers = {id(layer) for _, layer, _ in four_bit_layers(model)}
    for prefix, wrapper in model.named_modules() if layers else ():
        if not is_wrapper(wrapper) or id(unwrapped(wrapper)) not in layers:
            continue
        held = [
            n
            for n, child in own_children(wrapper).items()
            if child is not None and any(True for _ in child.parameters())
        ]
        wrong = [type(variant).__name__ for variant in getattr(wrapper, "lora_variant", {}).values()]
        wrong += [name for name in held if name not in (*_ON_FOUR_BITS, *STEPS)]
        if wrong:
            raise ValueError(
                f"{wrong[0]} of {prefix} ({type(wrapper).__module__}.{type(wrapper).__name__}): the layer is quantized "
                "to four bits, and what this asks of its weights was not compared with one process; use LoRA without "
                "use_dora or IA3 there, or load the base without quantization_config"
            )


def check_recomputed_and_compiled(model: nn.Module) -> None:
    """Check that adapters can be compiled inside of a recomputation.

    Raises:
        ValueError: for DoRA, which asks a weight for the module of its class, and torch cannot trace that there.
    """
    for prefix, wrapper in model.named_modules():
        if is_wrapper(wrapper) and own_children(wrapper).get("lora_magnitude_vector"):
            raise ValueError(
                f"use_dora of {prefix}: torch cannot trace DoRA of peft where blocks are both compiled and recomputed; "
                "use enable_compile=False or activation_checkpointing=False, or LoRA without use_dora"
            )
