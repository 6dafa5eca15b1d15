"""Models that are built in other dtypes than the precision stores: no digit is lost, no dtype is another strategy's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_own_code import Noted
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.subjects import gather_part
from tests.support.training import HIDDEN, VOCABULARY, batches, make_trainer, tiny_llama

SEVERAL = ["ddp-2", "fsdp2-dp2", "megatron1-dp2", "megatron3-dp2"]


class Stored(Noted):
    """Trains a model of a dtype."""

    def __init__(self, dtype: torch.dtype, build: Any = tiny_llama) -> None:
        super().__init__()
        self.stored, self.build = dtype, build

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build().to(self.stored)

    def on_train_start(self) -> None:
        self.before = {name: gather_part(p) for name, p in self.named_parameters()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep nothing."""


def train(layout: str | None, precision: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Runs on each rank."""
    strategy: Any = LAYOUTS[layout].make() if layout else "auto"
    module, data_size = Stored(dtype), LAYOUTS[layout].data_size if layout else 1
    make_trainer(strategy, max_epochs=1, precision=precision).fit(module, batches(data_size))
    return {"losses": module.losses, "before": module.before}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SEVERAL)
def test_float32_is_float32_whatever_was_built(layout: str, nursery: Nursery, pool2: Pool) -> None:
    """One process of Lightning's own goes on in bfloat16, see precision.md."""
    expected = pool2.run(train, "fsdp2-tp2", "32-true", torch.bfloat16, trainer=True)[0]
    found = pool2.run(train, layout, "32-true", torch.bfloat16, trainer=True)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)


@pytest.mark.parametrize("layout", SEVERAL)
def test_master_weights_have_all_digits_of_float16(layout: str, pool2: Pool) -> None:
    found = pool2.run(train, layout, "bf16-mixed", torch.float16, trainer=True)[0]["before"]
    for name, value in tiny_llama().half().named_parameters():
        assert found[f"model.{name}"].equal(value.float()), name


def test_models_in_float64_are_not_rounded(nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(train, None, "32-true", torch.float64, trainer=True)
    for layout in ("ddp-2", "fsdp2-dp2"):
        found = pool2.run(train, layout, "bf16-mixed", torch.float64, trainer=True)[0]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6), layout


class Tempered(Noted):
    """Holds parameters itself, one of each dtype that may be meant."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_llama()
            self.temperature = nn.Parameter(torch.tensor(0.7))
            self.shift = nn.Parameter(torch.full((VOCABULARY,), 0.01, dtype=torch.bfloat16))
            self.count = nn.Parameter(torch.tensor(2), requires_grad=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        logits = self.model(input_ids=batch[0]).logits / self.temperature + self.shift / self.count
        return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[0][:, 1:].flatten())

    def on_train_start(self) -> None:
        self.stored = {name: p.dtype for name, p in self.named_parameters(recurse=False)}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep nothing."""


def temper(layout: str, precision: Any) -> tuple[list[float], dict[str, torch.dtype]]:
    """Runs on each rank."""
    module = Tempered()
    make_trainer(LAYOUTS[layout].make(), max_epochs=1, precision=precision).fit(module, batches(2))
    return module.losses, module.stored


@pytest.mark.parametrize("precision", with_long(["bf16-true", "32-true", "bf16-mixed"], "bf16-mixed"))
def test_own_parameters_are_stored_as_those_of_models(precision: str, pool2: Pool) -> None:
    floating = torch.bfloat16 if precision == "bf16-true" else torch.float32
    of_layout = {layout: pool2.run(temper, layout, precision, trainer=True)[0] for layout in ("ddp-2", "fsdp2-dp2")}
    for _, stored in of_layout.values():
        assert stored == {"temperature": floating, "shift": floating, "count": torch.int64}
    losses = [losses for losses, _ in of_layout.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6 if precision == "32-true" else 3e-3)


# ---- batch norms -----------------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    """A block with a batch norm, whose statistics are buffers in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


def normalized() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Normalized() for _ in range(2))
    return nn.ModuleDict(
        {"embedding": nn.Embedding(VOCABULARY, HIDDEN), "blocks": blocks, "head": nn.Linear(HIDDEN, 4)}
    )


class Blocks(nn.Module):
    """Calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = normalized()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.parts["embedding"](ids)
        for block in self.parts["blocks"]:  # type: ignore[union-attr]
            x = block(x)
        return self.parts["head"](x)


class BatchNorms(Stored):
    """Each rank takes the statistics of its own samples, so all have the same ones."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(self.model(batch[0][:1]).flatten(0, 1).float(), batch[0][0] % 4)


def normalize(layout: str | None, precision: Any) -> list[float]:
    """Runs on each rank: losses over equal samples."""
    strategy: Any = LAYOUTS[layout].make() if layout else "auto"
    module = BatchNorms(torch.float32, Blocks)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batches(1).dataset.tensors[0][:1].repeat(6, 1)))
    make_trainer(strategy, max_epochs=1, precision=precision).fit(module, data)
    return module.losses[:3]


@pytest.mark.slow
@pytest.mark.parametrize("precision", with_long(["bf16-mixed", "bf16-true"], "bf16-true"))
def test_batch_norms_compute_with_their_statistics(precision: str, nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(normalize, None, "32-true", trainer=True)
    for layout in SEVERAL:
        found = pool2.run(normalize, layout, precision, trainer=True)[0]
        assert found == pytest.approx(expected, rel=2e-2), layout


# ---- files -----------------------------------------------------------------------------------------------------------


class Read(Stored):
    """Reads float16 files as bfloat16."""

    def __init__(self, path: Path) -> None:
        super().__init__(torch.bfloat16)
        self.path = path

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.bfloat16)


def read(layout: str, path: Path) -> dict[str, Any]:
    """Runs on each rank."""
    module = Read(path)
    make_trainer(LAYOUTS[layout].make(), max_epochs=1, precision="bf16-mixed").fit(module, batches(2))
    return module.before


@pytest.mark.parametrize("layout", ["ddp-2", "fsdp2-dp2", "megatron3-dp2"])
def test_float16_files_read_as_bfloat16_are_rounded(layout: str, pool2: Pool, tmp_path: Path) -> None:
    tiny_llama().half().save_pretrained(tmp_path)
    found = pool2.run(read, layout, tmp_path, trainer=True)[0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, value in plain.named_parameters():
        assert found[f"model.{name}"].equal(value.float()), name
