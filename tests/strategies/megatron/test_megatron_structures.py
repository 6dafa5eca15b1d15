"""Models of users' own under Megatron-FSDP: layers that samples choose, outputs without tensors on top, many ties, and
several optimizers; every gradient, also none, is that of one process.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_automodel.testing.pool import Pool
from tests.exactness.test_composite import IMAGE, PATCHES
from tests.exactness.test_composite import build as tiny_llava
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.subjects import gather_part, gradients_of
from tests.support.training import Recorder, make_trainer

WIDTH, KINDS, ROWS, WINDOW = 6, 5, 16, 4


class Own(Recorder):
    """Its rows come one by one, each with a number that may choose, and a step has some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[dict[str, Tensor | None]] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = self.build()

    def build(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, batch: list[Tensor]) -> Tensor:
        return cross_entropy(self.model(batch[0], int(batch[1])), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        values = gradients_of(self)
        self.gradients.append({n: None if p.grad is None else values[n] for n, p in self.named_parameters()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Experts(nn.Module):
    """Of which a row takes those with a score; some take all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(layers() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = scores > 0.25
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if chosen[:, i].any():
                out = out + (chosen * scores)[:, i : i + 1] * expert(x)
        return x + out


class Body(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, KINDS)  # registered before what it follows
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, number: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Routed(Own):
    def build(self) -> nn.Module:
        return Body([Experts() for _ in range(3)])


class Chosen(Own):
    """One of three blocks of a size, and one of three heads that the module has itself."""

    def build(self) -> nn.Module:
        class Chooses(Body):
            def forward(self, x: Tensor, number: int) -> Tensor:
                return self.head(self.blocks[number % 3](x))

        return Chooses([layers() for _ in range(3)])


class Skipped(Own):
    """A row passes over a block."""

    def build(self) -> nn.Module:
        class Skips(Body):
            def forward(self, x: Tensor, number: int) -> Tensor:
                for i, block in enumerate(self.blocks):
                    if i != number:
                        x = x + block(x)
                return self.head(x)

        return Skips([layers() for _ in range(3)])


class State:
    """What no container of torch's is."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class OfState(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layers, self.kind = layers(), kind

    def forward(self, x: Any) -> Any:
        hidden = x.hidden if isinstance(x, State) else x["hidden"] if isinstance(x, dict) else x
        hidden = hidden + self.layers(hidden)
        return State(hidden) if self.kind is State else {"hidden": hidden, "count": 1}


class States(Own):
    """Blocks return dicts or objects, and so does a module that has none."""

    def build(self) -> nn.Module:
        class Reads(Body):
            def forward(self, x: Tensor, number: int) -> Any:
                for block in self.blocks:
                    x = block(x)
                return {"logits": self.head(x.hidden)}  # type: ignore[attr-defined]

        return Reads([OfState(dict), OfState(State), OfState(dict), OfState(State)])

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.first = OfState(dict)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return cross_entropy(self.model(self.first(batch[0])["hidden"], 0)["logits"], batch[1])


class Tied(Own):
    """One weight under three names, and another one inside of blocks."""

    def build(self) -> nn.Module:
        body = Body([layers() for _ in range(3)])
        for block in (body.blocks[1], body.blocks[2]):
            block[2].weight = body.blocks[0][0].weight  # type: ignore[index,union-attr]
        body.blocks[2][0].bias = body.blocks[0][0].bias  # type: ignore[index,union-attr]
        return body


class Adversaries(Own):
    """The first loss leaves gradients on the second model, and the other way round."""

    automatic_optimization = False

    def build(self) -> nn.Module:
        self.judge = nn.Sequential(nn.Linear(WIDTH, KINDS), nn.Tanh(), nn.Linear(KINDS, 1))
        return layers()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        of_model, of_judge = self.optimizers()  # type: ignore[misc]
        of_model.zero_grad()
        self.manual_backward(softplus(-self.judge(self.model(batch[0]))).mean())
        of_model.step()
        if batch_idx % 2:
            of_judge.zero_grad()
        made = self.model(batch[0]).detach()
        self.manual_backward(softplus(-self.judge(batch[0])).mean() + softplus(self.judge(made)).mean())
        of_judge.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.5) for part in (self.model, self.judge)]


class Recomputed(Own):
    """Calls its blocks again, and recomputes each call in a backward pass of its own."""

    def build(self) -> nn.Module:
        class Again(Body):
            def forward(self, x: Tensor, number: int) -> Tensor:
                for block in (*self.blocks, *self.blocks):
                    x = checkpoint(block, x.requires_grad_(), use_reentrant=True)
                return self.head(x)

        return Again([layers() for _ in range(2)])


class RecomputedParts(Own):
    """The same of a layer that is in no list, and so a part of the whole."""

    def build(self) -> nn.Module:
        return Again()


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True).tanh()
        return x


class RecomputedWithin(Own):
    """The same of a part of a block."""

    def build(self) -> nn.Module:
        return Body([Again(), Again()])


class InParts(Own):
    """Calls the parts of a module without blocks, and the module."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"coder": Coder()})

    def loss(self, batch: list[Tensor]) -> Tensor:
        coder = self.model["coder"]
        code = coder.encoder(batch[0])
        return coder.decoder(code).square().mean() + cross_entropy(coder(batch[0]), batch[1]) + code.mean()


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).tanh())


class HooksOutputs(Own):
    """Halves, behind the forward pass, the gradients of what the model returned and has gone on with."""

    def build(self) -> nn.Module:
        class Body(nn.Module):
            def __init__(self, as_dict: bool) -> None:
                super().__init__()
                self.first, self.last, self.as_dict = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), as_dict

            def forward(self, x: Tensor) -> Any:
                hidden = self.first(x).tanh()
                loss = self.last(hidden).square().mean()
                return {"loss": loss, "hidden": hidden} if self.as_dict else (loss, hidden)

        return nn.ModuleList([Body(as_dict=False), Body(as_dict=True)])

    def loss(self, batch: list[Tensor]) -> Tensor:
        first, hidden = self.model[0](batch[0])
        second = self.model[1](hidden)
        for tensor in (hidden, second["hidden"]):
            tensor.register_hook(lambda gradient: gradient / 2)
        [gradient] = torch.autograd.grad(second["loss"], second["hidden"], retain_graph=True)
        return first + second["loss"] + (second["hidden"] * gradient).sum()


class FailsOnce(Adversaries):
    """A backward pass ends in its middle, and is done again."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx % 2:
            hidden = self.model[0](batch[0])
            hidden.register_hook(self.fail)
            backward = Tensor.backward if batch_idx == 1 else self.manual_backward
            with pytest.raises(ArithmeticError):
                backward(self.model[2](hidden).square().mean())
        self.zero_grad()
        super().training_step(batch, batch_idx)

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError


class Sees(Own):
    """Every second of its rows has an image, for a tower that other rows pass over."""

    def build(self) -> nn.Module:
        return tiny_llava().requires_grad_(True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        words, number = (batch[0].abs() * 10).long() % IMAGE, int(batch[1])
        if number % 2:
            return self.model(input_ids=words, labels=words).loss
        ids = torch.cat([torch.full((1, PATCHES), IMAGE), words], dim=1)
        pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(number))
        return self.model(input_ids=ids, labels=ids, pixel_values=pixels).loss


CASES: list[type[Own]] = [
    Routed,
    Chosen,
    Skipped,
    States,
    Tied,
    Adversaries,
    Recomputed,
    RecomputedParts,
    InParts,
    FailsOnce,
    HooksOutputs,
    Sees,
]


def run(strategy: Strategy, data_size: int, case: type[Own]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    module = case()
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    numbers = torch.randint(KINDS, (ROWS,), generator=torch.Generator().manual_seed(2))
    by_hand = not module.automatic_optimization
    data = DataLoader(TensorDataset(inputs, numbers), batch_size=WINDOW // data_size if by_hand else 1)
    settings = {} if by_hand else {"accumulate_grad_batches": WINDOW // data_size}
    make_trainer(strategy, max_epochs=1, **settings).fit(module, data)
    return module.gradients, {name: gather_part(parameter) for name, parameter in module.named_parameters()}


def of(layout: str) -> list[type[Own]]:
    return [case for case in CASES if layout != "megatron3-dp2" or case is not InParts]


def on_ranks(layout: str) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    return [run(LAYOUTS[layout].make(), LAYOUTS[layout].data_size, case) for case in of(layout)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", with_long([f"megatron{i}-dp2" for i in range(4)], *(f"megatron{i}-dp2" for i in range(3)))
)
def test_gradients_and_weights_are_those_of_one_process(layout: str, pool2: Pool) -> None:
    for case, found in zip(of(layout), pool2.run(on_ranks, layout, trainer=True)[0], strict=True):
        expected = run(SingleDeviceStrategy(), 1, case)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda m, case=case: f"{case}: {m}")


def refused() -> list[str]:
    messages = []
    for case in (RecomputedWithin, InParts):
        with pytest.raises(ValueError, match="Megatron-FSDP") as caught:
            run(LAYOUTS["megatron3-dp2"].make(), 2, case)
        messages.append(str(caught.value))
    return messages


def test_what_would_be_wrong_is_an_error(pool2: Pool) -> None:
    for twice, part in pool2.run(refused, trainer=True):
        assert "a backward pass reached blocks.1.layer.bias twice" in twice
        assert "use_reentrant=False" in twice
        assert "Coder.encoder is called by itself, and is a part of Coder, which Megatron-FSDP gathers as one" in part
