"""Batches with images for any model that reads them: shapes are tried until the model runs and looks at the pixels."""

import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.comparison import loss_of
from tests.support.families import FIRST_SPECIAL_ID
from tests.support.sizes import WIDTH

ROWS, LENGTH, MOST_TOKENS = 2, 48, 40
TOKEN_FIELDS = ("image_token_id", "image_token_index", "image_patch_id", "img_context_token_id", "video_token_index")
TYPE_ARGUMENTS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
PIXEL_ARGUMENTS = ("pixel_values", "flattened_patches", "image_patches", "pixel_values_images", "high_res_pixel_values")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    """What a model takes besides text.

    Attributes:
        images: arguments of the forward pass for :data:`ROWS` rows of one image each; empty: text only.
        tokens: placeholders that an image takes in a row.
        image_id: the placeholder; ``None``: the model has none.
        types: names of arguments that tell placeholders from text.
        reason: why there are no images.
        images_needed: the model does not run on text alone.
    """

    images: Batch = field(default_factory=dict)
    tokens: int = 0
    image_id: int | None = None
    types: tuple[str, ...] = ()
    reason: str = ""
    images_needed: bool = False

    def draw(self, generator: torch.Generator, with_images: bool) -> Batch:
        """Random text, with random images in front of it if so wished and possible."""
        ids = torch.randint(3, FIRST_SPECIAL_ID, (ROWS, LENGTH), generator=generator)
        batch: Batch = {}
        if with_images and self.images:
            if self.image_id is not None:
                ids[:, 1 : 1 + self.tokens] = self.image_id
            for name, value in self.images.items():
                random = name in PIXEL_ARGUMENTS
                batch[name] = torch.rand(value.shape, generator=generator) if random else value
        types = (ids == (-1 if self.image_id is None else self.image_id)).long()
        return {"input_ids": ids, "labels": ids, **batch, **dict.fromkeys(self.types, types)}


def find_inputs(model: nn.Module) -> Inputs:
    """The first of many guesses with which ``model`` runs and the gradient reaches the pixels.

    Where none does, text alone; the reason is what was wrong with the first guess.
    """
    arguments = set(inspect.signature(model.forward).parameters)
    if not arguments & {*PIXEL_ARGUMENTS}:
        return Inputs(reason="no argument of its forward pass takes pixels")
    types = tuple(name for name in TYPE_ARGUMENTS if name in arguments)
    image_id = next((v for f in TOKEN_FIELDS if isinstance(v := getattr(model.config, f, None), int)), None)
    reason = ""
    for images in _guesses(model, arguments):
        found, problem = _count_tokens(model, Inputs(images, 0, image_id, types))
        if found is not None:
            return replace(found, images_needed=not _runs_on_text(model, found))
        reason = reason or problem
    return Inputs(types=types, image_id=image_id, reason=reason)


def _count_tokens(model: nn.Module, guess: Inputs) -> tuple[Inputs | None, str]:
    """The guess with as many placeholders as the model wants, or what is wrong with the guess."""
    first = _problem(model, replace(guess, tokens=1))
    counts = list(range(1, MOST_TOKENS + 1))
    if guess.image_id is None:
        counts = [0]
    elif first and (features := re.search(r"features:? (\d+)", first)):  # most models say how many they want
        counts = [n // size for n in [int(features[1])] for size in (ROWS, ROWS * WIDTH) if n // size in counts]
    for tokens in counts:
        inputs = replace(guess, tokens=tokens)
        problem = _problem(model, inputs)
        if problem is None:
            return inputs, ""
        if tokens > 1 and problem == first:  # it has nothing to do with their number
            break
    return None, first or ""


def _problem(model: nn.Module, inputs: Inputs) -> str | None:
    batch = inputs.draw(torch.Generator().manual_seed(0), with_images=True)
    pixels = [batch[name].requires_grad_() for name in PIXEL_ARGUMENTS if name in batch]
    try:
        loss = loss_of(model, batch)
        grads = torch.autograd.grad(loss, pixels, allow_unused=True)
    except Exception as error:  # whatever a model raises means that this guess is wrong
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if any(grad is not None and grad.norm() > 0 for grad in grads) or _looks_at(model, batch, loss):
        return None
    return "the loss does not depend on the pixels"


def _looks_at(model: nn.Module, batch: Batch, loss: Tensor) -> bool:
    """Whether other pixels give another loss: no gradient goes through tokens that a codebook gives for an image."""
    others = {name: torch.rand(x.shape) if name in PIXEL_ARGUMENTS else x for name, x in batch.items()}
    return bool(loss_of(model, others) != loss)


def _runs_on_text(model: nn.Module, inputs: Inputs) -> bool:
    try:
        model(**inputs.draw(torch.Generator().manual_seed(0), with_images=False))
    except Exception:
        return False
    return True


def _guesses(model: nn.Module, arguments: set[str]) -> Iterator[Batch]:
    names = [name for name in PIXEL_ARGUMENTS if name in arguments]
    size, patch, temporal = _sizes(model)
    grid = size // patch
    sides = _side_arguments(size, grid, patch)
    known = {name: values for name, values in sides.items() if name in arguments}
    for shape in _pixel_shapes(size, patch, grid, temporal):
        for values in itertools.product(*known.values()):
            extra = {name: value for name, value in zip(known, values, strict=True) if value is not None}
            yield {**{name: torch.randn(shape) for name in names}, **extra}


def _sizes(model: nn.Module) -> tuple[int, int, int]:
    config = model.config
    vision = next((c for n in ("vision_config", "encoder") if (c := getattr(config, n, None)) is not None), config)
    vision = getattr(vision, "vision_config", vision)

    def first(name: str, default: int) -> int:
        value: Any = getattr(vision, name, None) or default
        return int(value[0] if isinstance(value, list | tuple) else value)

    return 56, 14, max(first("temporal_patch_size", 1), first("patch_temporal", 1))


def _pixel_shapes(size: int, patch: int, grid: int, temporal: int) -> Iterator[tuple[int, ...]]:
    area = 3 * patch * patch
    yield (ROWS, 3, size, size)
    yield (ROWS, 1, 3, size, size)
    yield (ROWS, 2, 3, size, size)
    yield (ROWS * grid * grid, area * temporal)
    yield (ROWS * grid * grid, area)
    yield (ROWS, grid * grid, area)
    yield (ROWS, grid * grid, area + 2)
    yield (ROWS * grid * grid, 3, patch, patch)
    yield (1, 3, patch, ROWS * grid * grid * patch)
    yield (ROWS, 1, 4, 3, size, size)
    yield (ROWS, size, size, 3)
    yield (ROWS * grid * grid, 2 * patch, 2 * patch, 3)


def _side_arguments(size: int, grid: int, patch: int) -> dict[str, list[Tensor | None]]:
    """What else a forward pass may want to know about the images; ``None``: left out."""
    every = torch.ones(ROWS, 1, dtype=torch.long)
    square = torch.tensor([[grid, grid]] * ROWS)
    rows, columns = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    positions = torch.stack([columns, rows], -1).flatten(0, 1).repeat(ROWS, 1, 1)
    return {
        "image_grid_thw": [torch.tensor([[1, grid, grid]] * ROWS)],
        "image_grid_hw": [square],
        "spatial_shapes": [square],
        "target_sizes": [square],
        "image_position_ids": [positions],
        "image_merge_sizes": [torch.ones(ROWS, dtype=torch.long)],
        "image_sizes": [torch.tensor([[size, size]] * ROWS), None],
        "pixel_attention_mask": [None, torch.ones(ROWS, grid * grid, dtype=torch.long), every, every.bool()],
        "aspect_ratio_ids": [every],
        "aspect_ratio_mask": [every[:, None].expand(-1, -1, 4).contiguous()],
        "cross_attention_mask": [torch.ones(ROWS, LENGTH, 1, 4, dtype=torch.long)],
        "image_attention_mask": [torch.ones(ROWS, LENGTH, 1, dtype=torch.long)],
        "image_grids": [torch.tensor([[2, 2, 0, 0]] * ROWS)],
        "image_token_pooling": [torch.arange(ROWS * grid * grid).view(-1, 4)],
        "image_num_crops": [torch.ones(ROWS, dtype=torch.long)],
        "bbox": [torch.tensor([0.1, 0.2, 0.5, 0.6]).expand(ROWS, LENGTH, 4).contiguous()],
        "qformer_input_ids": [torch.full((ROWS, 8), 5)],
        "state": [torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(0))],
        "actions": [torch.randn(ROWS, 16, 32, generator=torch.Generator().manual_seed(1))],
        "image_embeds_position_mask": [(torch.arange(LENGTH) < 4).long().repeat(ROWS, 1)],
    }
