"""Lists of which a pass calls some members, told from chains by their code."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.modules.structure import find_independent_blocks


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))


class Chain(Holder):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Indexed(Holder):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.layers)):
            layer = self.layers[i]
            x = layer(x) + self.layers[0](x)
        return x


class Read(Chain):
    def layer_of(self, index: int) -> nn.Module:
        self.layers[index].requires_grad_(True)
        return self.layers[index]


class Recomputed(Holder):
    def forward(self, x: Tensor, states: list[Tensor] | None = None) -> Tensor:
        for layer in self.layers:
            if states is not None:
                states.append(x)
            if self.training:
                with torch.no_grad():
                    x = layer(x)
            else:
                x = layer(x)
            if x is None:
                continue
        return x


class Task(Holder):
    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.layers[task](x)


class Inherits(Task):
    pass


class Named(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    def forward(self, x: Tensor, tasks: list[str]) -> list[Tensor]:
        return [self.layers[task](x) for task in tasks]


class Experts(Holder):
    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if (chosen == i).any():
                x = x.index_add(0, (chosen == i).nonzero()[:, 0], layer(x[chosen == i]))
        return x


class Hit(Holder):
    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for i in chosen.unique().tolist():
            x = x + self.layers[i](x)
        return x


class LeftOut(Holder):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                continue
            x = layer(x)
        return x


class Deepens(Holder):
    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            for layer in self.layers:
                x = layer(x)
        return x


class Halts(Holder):
    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = self.layers[0](x)
        return x


class PerImage(Holder):
    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return torch.cat([self.each(x, i) for i in range(len(sizes))])

    def each(self, x: Tensor, sizes: Tensor) -> Tensor:
        found = []
        for i in range(len(sizes)):
            part = x[i]
            for j in range(3):
                part = self.layers[j](part)
            found.append(part)
        return torch.cat(found)


class OfImages(Holder):
    def forward(self, images: list[Tensor]) -> list[Tensor]:
        found = []
        for image in images:
            for layer in self.layers:
                image = layer(image)
            found.append(image)
        return found


class Encoded(Holder):
    def forward(self, images: list[Tensor]) -> list[Tensor]:
        return [self.one(image) for image in images]

    def one(self, image: Tensor) -> Tensor:
        return self.encode(image).relu()

    def encode(self, image: Tensor) -> Tensor:
        for layer in self.layers:
            image = layer(image)
        return image


class Twice(Holder):
    """Passes its layers once for each of two arguments, and for each member of a list of its own."""

    def forward(self, left: Tensor, right: Tensor) -> list[Tensor]:
        sides = []
        for side in (left, right):
            for layer in self.layers:
                side = layer(side)
            sides.append(side)
        for _, (other, side) in enumerate(zip(self.children(), sides, strict=False)):
            for layer in self.layers:
                side = layer(other(side))
        return [self.encode(side) for side in [left, right]]

    def encode(self, image: Tensor) -> Tensor:
        return self.layers[0](self.layers[1](image))


class Deep(Holder):
    """Passes its layers as often as it was built for, and in an evaluation by chunks of the sequence."""

    times = 2

    def forward(self, x: Tensor) -> Tensor:
        times = self.times
        for _ in range(times):
            for layer in self.layers:
                x = layer(x)
        with torch.no_grad():
            while len(x) > 1:
                x = self.layers[0](x)[1:]
        return x


@pytest.mark.parametrize("kind", [Chain, Indexed, Read, Recomputed, Deep, Twice])
def test_a_chain(kind: type[Holder]) -> None:
    assert list(find_independent_blocks(kind())) == ["layers.0", "layers.1", "layers.2"]


CHOSEN = [Task, Inherits, Named, Experts, Hit, LeftOut, Deepens, Halts, PerImage, OfImages, Encoded]


@pytest.mark.parametrize("kind", CHOSEN)
def test_what_is_chosen_belongs_to_its_holder(kind: type[Holder]) -> None:
    assert find_independent_blocks(kind()) == {}
