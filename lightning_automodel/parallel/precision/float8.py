"""Matrix products of blocks in float8, by torchao's training recipes: weights stay as they are, and are cast for each.

::

    linear of a block -> torchao's linear with the same parameter -> tensor parallelism, checkpointing, compile, FSDP2
"""

from dataclasses import replace

import torch
from torch import nn

from lightning_automodel.distributed.logs import log, warn_once
from lightning_automodel.modules.structure import find_blocks

_MULTIPLE = 16  # of rows and columns, which the kernels of float8 need
_CAPABILITY = (8, 9)  # of the first GPUs with float8


def apply_float8(model: nn.Module, recipe: str, tp: int, device_type: str) -> None:
    """Replaces linear layers inside of the blocks of ``model``, in place; names and parameters stay.

    To be called before the model is split. Layers whose sizes do not divide by 16 on each of ``tp`` ranks stay as they
    are. Scales are of what a rank holds. On CPU products are emulated: values are rounded to float8, and multiplied in
    their own dtype.

    Raises:
        ValueError: if there is no such layer, or the GPU has no float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if device_type == "cuda" and torch.cuda.get_device_capability() < _CAPABILITY:
        raise ValueError(
            f"float8={recipe!r} needs a GPU of compute capability 8.9 (Ada, Hopper) or newer, and this one has "
            f"{'.'.join(map(str, torch.cuda.get_device_capability()))}; use mp_policy with bfloat16"
        )
    config = Float8LinearConfig.from_recipe_name(recipe)
    if device_type == "cpu":
        warn_once("float8 is emulated on CPU: the numbers of a GPU, not its speed")
        config = replace(config, emulate=True)
    found = 0

    def fits(module: nn.Module, _: str) -> bool:
        nonlocal found
        fit = isinstance(module, nn.Linear) and not any(size % (_MULTIPLE * tp) for size in module.weight.shape)
        found += fit
        return fit

    for block in find_blocks(model).values():
        convert_to_float8_training(block, module_filter_fn=fits, config=config)
    if not found:
        raise ValueError(
            f"float8={recipe!r} finds no linear layer in blocks of {type(model).__name__} whose sizes divide by "
            f"{_MULTIPLE} x tp = {_MULTIPLE * tp}; leave it at None"
        )
    log(f"{type(model).__name__}: {found} linear layers of blocks multiply in float8 ({recipe})")
