"""Parameters without dimensions: in modules that ``tp`` splits, in one that it leaves whole, and one that is frozen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPConfig, CLIPModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from lightning_automodel import DDPStrategy
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.parallel.fsdp2 import over_gloo
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.marks import with_long
from tests.support.training import (
    Recorder,
    SaveAfter,
    batches,
    largest_difference,
    make_trainer,
    tiny_llama,
    whole,
    whole_parameters,
)

BOUND = 1e-4
SIZES = [
    {"dp_shard": 2},
    {"tp": 2},
    {"cp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 4},
]


class WeighedMLP(LlamaMLP):
    factor: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


class WeighedNorm(LlamaRMSNorm):
    factor: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def with_scalars() -> nn.Module:
    """A tiny Llama that weighs its feed-forwards and its last norm, and the first of them by a constant."""
    model: Any = tiny_llama(tied=False)
    weighed = {layer.mlp: WeighedMLP for layer in model.model.layers} | {model.model.norm: WeighedNorm}
    for index, (module, kind) in enumerate(weighed.items()):
        module.__class__ = kind
        module.factor = nn.Parameter(torch.tensor(0.8 + index), requires_grad=index > 0)
    return model


class Weighed(Recorder):
    """Keeps the gradients of each step."""

    def __init__(self, optimizer: Any = torch.optim.SGD, **arguments: Any) -> None:
        super().__init__()
        self.optimizer, self.arguments = optimizer, arguments
        self.gradients: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = with_scalars()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: whole(p.grad) for name, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.05, **self.arguments)


def train(sizes: dict[str, Any] | None, **arguments: Any) -> tuple[Any, ...]:
    """Runs on each rank."""
    module = Weighed(**arguments)
    strategy = DDPStrategy() if sizes is None else dict(sizes)
    sizes = sizes or {}
    run = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5)
    run.fit(module, batches(sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)))
    return module.losses, module.gradients, whole_parameters(module)


def check(one: tuple[Any, ...], many: tuple[Any, ...]) -> None:
    assert one[0] == pytest.approx(many[0], rel=BOUND)
    for expected, actual in zip([*one[1], one[2]], [*many[1], many[2]], strict=True):
        assert expected.keys() == actual.keys()
        for name, value in expected.items():
            assert actual[name].shape == value.shape
            assert (actual[name] - value).norm() <= BOUND * value.norm().clamp(min=1e-3), name


@pytest.mark.parametrize("sizes", with_long(SIZES, *SIZES[-2:]), ids=str)
def test_steps_are_those_of_one_process(sizes: dict[str, int], nursery: Nursery) -> None:
    (expected,) = Pool(nursery, 1).run(train, None, trainer=True)
    ranks = torch.tensor(list(sizes.values())).prod().item()
    for actual in Pool(nursery, int(ranks)).run(train, sizes, trainer=True):
        check(expected, actual)


class EachItsOwn(Weighed):
    """Keeps what this rank has of the gradients of scalars."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.held = [
            float(to_local_if_dtensor(p.grad)) for p in self.parameters() if p.ndim == 0 and p.grad is not None
        ]


def round_apart() -> list[float]:
    """Runs on each rank, where sums are rounded unlike: NCCL adds in an order of the rank that a sum is for."""
    add = over_gloo.reduce_scatter

    def rounded(outputs: list[Tensor], inputs: list[Tensor], group: Any, mean: bool) -> None:
        add(outputs, inputs, group, mean)
        for output in outputs:
            output.mul_(1 + 1e-4 * group.rank())

    module = EachItsOwn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(over_gloo, "reduce_scatter", rounded)
        make_trainer({"dp_shard": 2}, max_steps=1, max_epochs=1).fit(module, batches(2))
    return module.held


def test_ranks_do_not_come_apart_by_rounding(pool2: Pool) -> None:
    first, second = pool2.run(round_apart, trainer=True)
    assert len(first) == 2
    assert first == second


# ---- files -----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any] | None] = {
    "dp_shard=2": {"dp_shard": 2},
    "tp=2": {"tp": 2},
    "dp_shard=2, one file": {"dp_shard": 2, "save_distributed_checkpoint": False},
    "DDP": None,
    "dp_shard=2 x tp=2": {"dp_shard": 2, "tp": 2},
    "dp_replicate=2 x dp_shard=2": {"dp_replicate": 2, "dp_shard": 2},
}


def train_on(layout: str, path: Path, resume: Path | None, kind: str) -> dict[str, Any]:
    """Runs on each rank: between two micro-batches of the second step it saves."""
    sizes = LAYOUTS[layout]
    module = Weighed(torch.optim.AdamW, **{kind: True})
    strategy: Any = DDPStrategy() if sizes is None else sizes
    data = 2 if sizes is None else sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
    saver = [] if resume else [SaveAfter(path, 3)]
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    make_trainer(strategy, callbacks=saver, **settings).fit(module, batches(data), ckpt_path=resume)
    (optimizer,) = module.trainer.optimizers
    steps = [state["step"] for state in optimizer.state.values()]
    return {
        "losses": module.losses,
        "parameters": whole_parameters(module),
        "steps": {(type(step), float(step)) for step in steps},
    }


@pytest.mark.slow
@pytest.mark.parametrize("source", with_long(LAYOUTS, *list(LAYOUTS)[1:]))
def test_it_goes_on_in_any_layout(source: str, pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    """By the foreach form of an optimizer, and by the fused one."""
    path = tmp_path / "mid.ckpt"

    def start(layout: str, resume: Path | None, kind: str) -> dict[str, Any]:
        pool = pool4 if " x " in layout else pool2
        return pool.run(train_on, layout, path, resume, kind, trainer=True)[0]

    whole = start(source, None, "foreach")
    for index, layout in enumerate(LAYOUTS):
        again = start(layout, path, "fused" if index % 2 else "foreach")
        assert again["losses"] == pytest.approx(whole["losses"][3:], abs=1e-6), layout
        assert largest_difference(again, whole) < 5e-6, layout
        assert again["steps"] == whole["steps"] == {(Tensor, 4.0)}, layout


def tiny_clip() -> CLIPModel:
    """Its ``logit_scale`` has no dimensions."""
    common: Any = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text: dict[str, Any] = {
        **common,
        "vocab_size": 99,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision: Any = {**common, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


class Contrasting(Recorder):
    """CLIP from files, on pairs of a picture and a text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def configure_model(self) -> None:
        if self.model is None:
            self.model = CLIPModel.from_pretrained(self.path)

    def loss(self, batch: list[Tensor]) -> Tensor:
        ids, pixels = batch
        return self.model(input_ids=ids, pixel_values=pixels, return_loss=True).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def contrast(strategy: Any, directory: Path, data: int, name: str) -> dict[str, Tensor]:
    """Runs on each rank. Pairs of one batch of a data rank: one process takes the same, each as a micro-batch."""
    draws = torch.Generator().manual_seed(1)
    ids, pixels = torch.randint(3, 99, (16, 8), generator=draws), torch.randn(16, 3, 28, 28, generator=draws)
    order = torch.arange(16) if strategy else torch.arange(16).view(-1, 2, data).transpose(1, 2).flatten()
    loader = DataLoader(TensorDataset(ids[order], pixels[order]), batch_size=2)
    module = Contrasting(directory / "start")
    settings: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 4 // (data if strategy else 1)}
    make_trainer(strategy or DDPStrategy(), **settings).fit(module, loader)
    whole = whole_parameters(module.model)
    module.model.save_pretrained(directory / name)
    return whole


CLIP_SIZES = [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}]


@pytest.mark.parametrize("sizes", with_long(CLIP_SIZES, CLIP_SIZES[-1]), ids=str)
def test_clip_from_files_to_files(sizes: dict[str, int], nursery: Nursery, tmp_path: Path) -> None:
    tiny_clip().save_pretrained(tmp_path / "start")
    ranks = 2 * len(sizes)
    (one,) = Pool(nursery, 1).run(contrast, None, tmp_path, ranks, "one", trainer=True)
    for many in Pool(nursery, ranks).run(contrast, sizes, tmp_path, ranks, "many", trainer=True):
        for name, parameter in one.items():
            assert torch.allclose(parameter, many[name], atol=1e-6), name
    written = load_file(tmp_path / "many/model.safetensors")
    assert written["logit_scale"].shape == ()
    assert all(torch.equal(value, many[name]) for name, value in written.items())
