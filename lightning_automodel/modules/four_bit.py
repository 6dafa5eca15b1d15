"""Keeps four-bit matrices of bitsandbytes as rows of bytes, which are sharded, split, gathered and sent as any others.

bitsandbytes has the bytes of a matrix in one column, and what scales its blocks of 64 numbers beside the parameter,
where nothing shards it. Here a block keeps its scale, and whoever has the rows, or the columns between two blocks, can
compute with them. ``k_proj`` [4, 128], two blocks per row, over dp_shard=2::

              block 0         scale      block 1         scale
    row 0     32 bytes        4          32 bytes        4             GPU 0
    row 1     32 bytes        4          32 bytes        4
    row 2     32 bytes        4          32 bytes        4             GPU 1
    row 3     32 bytes        4          32 bytes        4

With double quantization (``compress_statistics``) a scale takes one byte, and those of 256 blocks have one of their own
and an offset in common, which lie in ``weight_scales`` [groups + 1, 4 bytes]. Where tensor parallelism splits layers,
the groups would be cut, so that scales take four bytes again; their values stay.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel._compat.torch.modules import own_parameters

SCALES = "weight_scales"
_FORM = "_four_bit_form"
_GROUP = 256
"""Blocks whose scales are quantized together, in bitsandbytes."""


@dataclass(frozen=True, kw_only=True)
class FourBit:
    """How the matrix of one layer lies in bytes.

    Attributes:
        shape: of the matrix, [out, in].
        block: numbers that share a scale.
        kind: "nf4" or "fp4".
        doubled: scales are quantized, too.
        nested: they are kept so, in one byte each.
        dtype: of the numbers before they were quantized; ``None`` until they are.
    """

    shape: tuple[int, int]
    block: int
    kind: str
    doubled: bool
    nested: bool
    dtype: torch.dtype | None = None

    @property
    def blocks(self) -> int:
        """Count the blocks of the matrix."""
        return -(-prod(self.shape) // self.block)

    @property
    def ends_with_rows(self) -> bool:
        """Tell whether rows are whole blocks; else a row of bytes is a block."""
        return self.shape[1] % self.block == 0

    @property
    def bytes_per_block(self) -> int:
        """Count the bytes of a block, its scale included."""
        return self.block // 2 + (1 if self.nested else 4)

    @property
    def stored(self) -> dict[str, tuple[int, int]]:
        """Compute the shapes of the bytes, by the names of parameters."""
        rows = self.shape[0] if self.ends_with_rows else self.blocks
        found = {"weight": (rows, self.blocks // rows * self.bytes_per_block)}
        return found | ({SCALES: (-(-self.blocks // _GROUP) + 1, 4)} if self.nested else {})

    def to_bytes(self, packed: Tensor, state: Any) -> dict[str, Tensor]:
        """Bring what bitsandbytes quantized into rows.

        Args:
            packed: its parameter.
            state: its ``QuantState``.

        Raises:
            ValueError: if it was quantized otherwise than the config of the model says.
        """
        self._check(state)
        numbers = packed.detach().contiguous().view(torch.uint8).reshape(-1)
        halves = numbers.new_zeros(self.blocks * (self.block // 2))
        halves[: numbers.numel()] = numbers
        scales, groups = _scales_of(state, self.nested)
        rows = torch.cat([halves.view(self.blocks, -1), scales.reshape(self.blocks, -1).view(torch.uint8)], dim=1)
        found = {"weight": rows.reshape(self.stored["weight"])}
        return found if groups is None else {**found, SCALES: groups.view(torch.uint8).view(-1, 4)}

    def _check(self, state: Any) -> None:
        found = (tuple(state.shape), state.blocksize, state.quant_type)
        is_standard = state.state2 is None or bool((state.state2.code.cpu() == _codes(torch.device("cpu"))).all())
        is_doubled = state.state2 is not None
        if found != (self.shape, self.block, self.kind) or is_doubled != self.doubled or not is_standard:
            raise ValueError(
                f"a matrix of {found[0]} was quantized in blocks of {found[1]} as {found[2]} (double quantization: "
                f"{is_doubled}), and the config of the model says {self.shape}, {self.block}, {self.kind} "
                f"({self.doubled}); load the weights before they were quantized"
            )

    def from_bytes(self, rows: Tensor, groups: Tensor | None) -> tuple[Tensor, Any]:
        """Make of rows, all or a rank's, what bitsandbytes computes with: its packed numbers and their state."""
        from bitsandbytes.functional import QuantState

        blocks = rows.reshape(-1, self.bytes_per_block)  # [blocks, bytes]
        packed, scales = blocks[:, : self.block // 2].reshape(-1, 1), blocks[:, self.block // 2 :].contiguous()
        columns = rows.shape[1] // self.bytes_per_block * self.block
        shape = (rows.shape[0], columns) if self.ends_with_rows else self.shape
        if groups is None:
            scales = scales.view(torch.float32)
            return packed, QuantState(scales.view(-1), torch.Size(shape), None, self.block, self.kind, self.dtype)
        values = groups.contiguous().view(torch.float32).view(-1)
        second = QuantState(values[:-1], blocksize=_GROUP, code=_codes(rows.device), dtype=torch.float32)
        given = (torch.Size(shape), None, self.block, self.kind, self.dtype, values[-1], second)
        return packed[: -(-prod(shape) // 2)], QuantState(scales.view(-1), *given)


def _scales_of(state: Any, nested: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the scales of blocks, and those of groups with the offset behind them."""
    from bitsandbytes.functional import dequantize_blockwise

    if state.state2 is None:
        return state.absmax.float(), None
    if nested:
        return state.absmax, torch.cat([state.state2.absmax.float(), state.offset.float().reshape(1)])
    return (dequantize_blockwise(state.absmax, state.state2) + state.offset).float(), None


@cache
def _codes(device: torch.device) -> Tensor:
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)


# ---- layers ----------------------------------------------------------------------------------------------------------


def is_four_bit(module: nn.Module) -> bool:
    """Tells whether ``module`` is a linear layer of bitsandbytes with four bits per weight."""
    library = sys.modules.get("bitsandbytes")
    return library is not None and isinstance(module, library.nn.Linear4bit)


def form_of(module: nn.Module) -> FourBit | None:
    """Returns how the weight of ``module`` lies in bytes, if it does."""
    return vars(module).get(_FORM)


def four_bit_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, FourBit]]:
    """Yields the layers of ``model`` whose weights lie in rows of bytes, with their names."""
    for name, module in model.named_modules():
        if (form := form_of(module)) is not None:
            yield name, module, form


def count_weights(model: nn.Module, trainable: bool = False) -> int:
    """Count the numbers in parameters of ``model``, those of four bits as numbers and not as bytes."""
    if trainable:
        return sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers = list(four_bit_layers(model))
    stored = {id(p) for _, module, form in layers for n, p in own_parameters(module).items() if n in form.stored}
    plain = sum(p.numel() for p in model.parameters() if id(p) not in stored)
    return plain + sum(prod(form.shape) for _, _, form in layers)


def store_as_rows(model: nn.Module, tp: int = 1) -> None:
    """Bring the weights of four-bit layers into rows of bytes, and let the layers compute with these, in place.

    Args:
        model: on the meta device, where weights are read into it afterwards, or quantized.
        tp: size of tensor parallelism.

    Raises:
        ValueError: if tp would cut blocks.
    """
    for name, module in model.named_modules():
        if not is_four_bit(module):
            continue
        if form_of(module) is None:
            _bring_into_rows(module)
        if tp > 1:
            _make_divisible(name, module, tp)
        module.forward = MethodType(_forward, module)


def _bring_into_rows(module: Any) -> None:
    weight = module.weight
    form = FourBit(
        shape=(module.out_features, module.in_features),
        block=weight.blocksize,
        kind=weight.quant_type,
        doubled=weight.compress_statistics,
        nested=weight.compress_statistics,
    )
    _store(module, form, {} if weight.is_meta else put_in(module, form, weight), weight.device)


def _make_divisible(name: str, module: Any, tp: int) -> None:
    form = form_of(module)
    assert form is not None
    if not form.ends_with_rows:
        raise ValueError(
            f"tp={tp}: {name} has in_features={module.in_features}, no multiple of {form.block}, so that blocks of "
            f"{form.block} weights with one scale go across its rows, and a cut between rows would cut them; use tp=1 "
            f"with dp_shard, or leave it in full precision: BitsAndBytesConfig(llm_int8_skip_modules=[{name!r}, ...])"
        )
    if form.nested:
        plain, given = replace(form, nested=False), {}
        if not module.weight.is_meta:
            given = plain.to_bytes(*form.from_bytes(module.weight.detach(), own_parameters(module).pop(SCALES)))
        _store(module, plain, given, module.weight.device)


def _store(module: nn.Module, form: FourBit, given: dict[str, Tensor], device: torch.device) -> None:
    own_parameters(module).pop(SCALES, None)
    for short, shape in form.stored.items():
        value = given.get(short, torch.empty(shape, dtype=torch.uint8, device=device))
        own_parameters(module)[short] = nn.Parameter(value, requires_grad=False)
    describe(module, replace(form, dtype=(form_of(module) or form).dtype))


def put_in(module: Any, form: FourBit, weight: Any) -> dict[str, Tensor]:
    """Note on ``module`` how ``weight`` of bitsandbytes was quantized. Returns its bytes by the names of parameters."""
    if weight.quant_state is None:
        weight = weight.to(weight.device)  # quantizes
    state = weight.quant_state
    vars(module)[_FORM] = replace(form, dtype=state.dtype)
    module.quant_state = None  # it holds all scales
    return form.to_bytes(weight.data, state)


def describe(module: nn.Module, form: FourBit) -> None:
    """Note on a layer how its weight lies in bytes, and on the weight what peft and transformers read there."""
    vars(module)[_FORM] = form
    if not form.nested:
        own_parameters(module).pop(SCALES, None)
    own_parameters(module)["weight"].__dict__.update(
        quant_type=form.kind,
        compress_statistics=form.doubled,
        blocksize=form.block,
        quant_storage=torch.uint8,
        quant_state=None,
        bnb_quantized=False,
        module=None,
    )


def _forward(module: Any, x: Tensor) -> Tensor:
    """Compute what bitsandbytes' layer does.

    Args:
        module: the layer.
        x: [..., in].
    """
    if not module.compute_type_is_set:
        module.set_compute_type(x)
        module.compute_type_is_set = True
    dtype = x.dtype if module.compute_dtype is None else module.compute_dtype
    bias = None if module.bias is None else module.bias.to(dtype)
    groups = own_parameters(module).get(SCALES)
    return _Product.apply(x.to(dtype), module.weight, groups, bias, form_of(module)).to(x.dtype)


class _Product(torch.autograd.Function):
    """Multiplies by a matrix of four bits, as bitsandbytes does, which keeps packed numbers for the backward pass.

    This keeps the parameter: FSDP2 frees it in between, and gathers it again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, groups: Tensor | None, bias: Tensor | None, form: FourBit) -> Tensor:
        from bitsandbytes import matmul_4bit

        ctx.form, ctx.bias_dtype = form, None if bias is None else bias.dtype
        ctx.save_for_backward(rows, groups)
        packed, state = form.from_bytes(rows, groups)
        return matmul_4bit(x, packed, state, bias=bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from bitsandbytes.functional import dequantize_4bit

        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            packed, state = ctx.form.from_bytes(*ctx.saved_tensors)
            of_x = grad @ dequantize_4bit(packed, state).to(grad.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = grad.flatten(0, -2).sum(0, dtype=ctx.bias_dtype)
        return of_x, None, None, of_bias, None
