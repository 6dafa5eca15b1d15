"""What models draw is a function of the seed, the step and the place in the mesh, whatever users draw beside them."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_automodel import DDPConfig, DDPStrategy, FSDP2Config, FSDP2TPStrategy
from lightning_automodel.distributed.random_numbers import RandomNumbers
from lightning_automodel.parallel.draws.passes import draw_from
from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.support.dropping import Dropping, run, saving, tiny_phi
from tests.support.layouts import LAYOUTS
from tests.support.training import LENGTH, VOCABULARY, batches, make_trainer, rows, whole_parameters, world_size

Again = Callable[[nn.Module, Tensor], Tensor]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def several(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs on each rank: several runs by name."""
    results = {}
    for name, case in cases.items():
        case = dict(case)
        module = Dropping(case.pop("picks", True))
        results[name] = run(case.pop("sizes"), module=module, **case)
    return results


@pytest.mark.slow
def test_replicas_stay_equal_whatever_one_rank_draws(pool2: Pool) -> None:
    """The same seed gives the same run, another seed another one; the user's own draws are the user's."""
    cases = {
        "picks": {"sizes": {"tp": 2}},
        "no picks": {"sizes": {"tp": 2}, "picks": False, "max_steps": 2},
        "other seed": {"sizes": {"tp": 2}, "seed": 2, "max_steps": 1},
    }
    first, second = pool2.run(several, cases, trainer=True)
    for name in cases:
        assert equal(first[name]["own"], second[name]["own"]), name
    assert first["picks"]["losses"][:4] == first["no picks"]["losses"]
    assert first["picks"]["draws"] != second["picks"]["draws"]
    assert first["no picks"]["draws"] == second["no picks"]["draws"]
    assert first["other seed"]["losses"][0] != first["picks"]["losses"][0]


def test_one_process_has_the_losses_of_two(pool2: Pool, nursery: Nursery) -> None:
    case = {"sizes": {}, "max_steps": 2}
    [one] = Pool(nursery, 1).run(several, {"one": case}, trainer=True)
    two = pool2.run(several, {"two": {**case, "sizes": {"tp": 2}}}, trainer=True)[0]
    assert two["two"]["losses"] == pytest.approx(one["one"]["losses"], abs=1e-5)


def test_passes_are_functions_of_their_place() -> None:
    """Data ranks differ, micro-batches differ, and a pass that draws moves users' generators by one number."""
    model, ids = tiny_phi().train(), rows(2)
    before = torch.get_rng_state(), random.getstate()

    def logits(data_rank: int = 0, step: int = 0, micro_batch: int = 0, skipped: int = 0) -> Tensor:
        draw_from(model, numbers := RandomNumbers(seed=0, data_rank=data_rank))
        numbers.begin("train", step, micro_batch)
        for _ in range(skipped):
            model(input_ids=ids)
        return model(input_ids=ids).logits

    found = [logits(), logits(data_rank=1), logits(step=1), logits(micro_batch=1), logits(skipped=1)]
    assert torch.equal(found[0], logits())
    assert [i for i in range(5) for j in range(i) if torch.equal(found[i], found[j])] == []
    with torch.no_grad():
        model.eval()(input_ids=ids)
    after = torch.get_rng_state()
    torch.set_rng_state(before[0])
    for _ in range(7):
        torch.randint(2, ())
    assert torch.equal(torch.get_rng_state(), after)
    assert random.getstate() == before[1]


# ---- passes that are computed again ----------------------------------------------------------------------------------


class Layers(L.LightningModule):
    """Layers of the user's own, each computed again in the backward pass, or not."""

    def __init__(self, again: Again | None) -> None:
        super().__init__()
        self.again, self.losses = again, list[float]()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, 16)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        for layer in self.layers:
            x = layer(x) if self.again is None else self.again(layer, x)
        loss = x.square().mean() + 0.1 * torch.rand(()) * x.mean()
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def not_reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def by_hand(layer: nn.Module, x: Tensor) -> Tensor:
    """First without a graph, as those do who cache gradients of representations."""
    state = torch.get_rng_state()
    with torch.no_grad():
        first = layer(x)
    torch.set_rng_state(state)
    second = layer(x)
    assert torch.equal(first, second)
    return second


def results(strategy: str | None, again: Again | None) -> tuple[list[float], dict[str, Tensor]]:
    """Runs on each rank: losses, and parameters after steps."""
    torch.manual_seed(1)
    module = Layers(again)
    trainer = make_trainer(LAYOUTS[strategy].make() if strategy else {}, max_steps=2, accumulate_grad_batches=2)
    trainer.fit(module, batches(world_size()))
    return module.losses, whole_parameters(module)


def all_results(strategy: str | None, ways: list[Again | None]) -> list[Any]:
    return [results(strategy, again) for again in ways]


@pytest.mark.parametrize("strategy", [None, "fsdp2-dp2", "ddp-2"])
def test_a_pass_that_is_computed_again_draws_the_same(pool2: Pool, nursery: Nursery, strategy: str | None) -> None:
    pool = pool2 if strategy else Pool(nursery, 1)
    for once, *others in pool.run(all_results, strategy, [None, reentrant, not_reentrant, by_hand], trainer=True):
        for losses, parameters in others:
            assert losses == pytest.approx(once[0], abs=1e-5)
            assert all(torch.allclose(value, once[1][name], atol=1e-5) for name, value in parameters.items())


def resumed(directory: Path, strategy: dict[str, Any], steps: int) -> dict[str, Any]:
    """Runs on each rank: a run of some steps, and some that go on from its first checkpoint, seeded otherwise."""
    whole = run(strategy, max_steps=steps, **saving(directory, 2))
    arguments: dict[str, Any] = {"resume": directory / "step=2.ckpt", "max_steps": steps}
    again = run(strategy, seed=5, **arguments)
    elsewhere = [run({"dp_shard": 2}, seed=seed, data_size=2, **arguments) for seed in (5, 6)]
    return {"whole": whole, "again": again, "elsewhere": elsewhere}


@pytest.mark.slow
def test_a_resumed_run_draws_what_the_whole_one_draws(pool2: Pool, tmp_path: Path) -> None:
    """On another layout it draws from the seed of the checkpoint, too, whatever that process was seeded with."""
    for found in pool2.run(resumed, tmp_path, {"tp": 2}, 4, trainer=True):
        assert found["again"]["losses"] == found["whole"]["losses"][4:]
        assert equal(found["again"]["whole"], found["whole"]["whole"])
        first, second = found["elsewhere"]
        assert equal(first["whole"], second["whole"])


# ---- the check of replicas -------------------------------------------------------------------------------------------


class Drifting(Dropping):
    """A hook that changes a parameter on one rank."""

    def on_train_batch_end(self, *args: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and self.trainer.global_step == 2:
            with torch.no_grad():
                norm = self.model.model.final_layernorm.weight
                getattr(norm, "to_local", lambda: norm)().mul_(1.01)


def drift(layout: str | None, every: int | None, directory: Path | None) -> None:
    if layout is not None:
        strategy: Any = LAYOUTS[layout].make()
    elif every is not None and dist.is_initialized():
        strategy = FSDP2TPStrategy(tp=2, config=FSDP2Config(check_replicas_every_n_steps=every))
    else:
        strategy = DDPStrategy(config=DDPConfig(check_replicas_every_n_steps=every))
    arguments = saving(directory, 3) if directory else {}
    run(strategy, module=Drifting(), max_steps=6, **arguments)


@pytest.mark.parametrize(("layout", "every"), [(None, 1), ("ddp-2", None), ("megatron3-tp2", None)])
def test_drift_is_an_error_that_names_the_parameter(
    pool2: Pool, tmp_path: Path, layout: str | None, every: int | None
) -> None:
    message = r"final_layernorm.weight is to be equal on all ranks of the \w+ axis, but rank 1 of it"
    with pytest.raises(RankFailed, match=message):
        pool2.run(drift, layout, every, None if every else tmp_path, trainer=True)


class Normalized(Dropping):
    """Running statistics of each rank's samples, or of all."""

    def __init__(self, of_all: bool) -> None:
        super().__init__()
        self.statistics, self.of_all = nn.BatchNorm1d(LENGTH), of_all

    def loss(self, batch: list[Tensor]) -> Tensor:
        if self.of_all:
            self.statistics.running_mean += self.trainer.strategy.reduce(batch[0].float().mean(0))  # type: ignore
            return super().loss(batch)
        return super().loss(batch) + self.statistics(batch[0].float()).square().sum()


def said_of_buffers(layout: str, of_all: bool, directory: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(LAYOUTS[layout].make(), module=Normalized(of_all), max_steps=2, **saving(directory / layout, 1))
    return [str(warning.message) for warning in caught if "the data ranks hold other values" in str(warning.message)]


@pytest.mark.parametrize(("layout", "of_all"), [("ddp-2", False), ("fsdp2-dp2", False), ("fsdp2-dp2", True)])
def test_buffers_that_follow_the_samples_of_a_rank_are_named(
    pool2: Pool, tmp_path: Path, layout: str, of_all: bool
) -> None:
    first, second = pool2.run(said_of_buffers, layout, of_all, tmp_path, trainer=True)
    assert [message.split(":")[0] for message in first] == (
        [] if of_all else ["statistics.running_mean and 1 more buffers of Normalized"]
    )
    assert second == []
