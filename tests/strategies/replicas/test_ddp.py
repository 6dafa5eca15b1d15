"""What only replication has: options of torch's wrapper, hooks on the reduction, one reader of the weights per node."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from transformers import AutoModelForCausalLM

from lightning_automodel import DDPConfig, DDPStrategy, FSDP2TPStrategy
from lightning_automodel._compat.torch.modules import hooks_after_accumulation
from lightning_automodel.loading import safetensors as file_slices
from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_own_code import Noted, check_gradients
from tests.support.subjects import save_families
from tests.support.training import (
    VOCABULARY,
    Descending,
    Recorder,
    batches,
    make_trainer,
    whole,
    whole_parameters,
    world_size,
)

# ---- without processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [{"tp": 2}, {"cp": 2}, {"dp_replicate": 2}, {"dp_shard": 2}])
def test_other_axes_are_refused(size: dict[str, int]) -> None:
    name = next(iter(size))
    with pytest.raises(ValueError, match=rf"use FSDP2TPStrategy\({name}=2\), or leave {name} out"):
        DDPStrategy(**size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"bucket_cap_mb": 0}, {"chunked_loss": 0}, {"loss_kernel": "none"}, {"compile_backend": "eager"}]
)
def test_fields_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DDPConfig(**wrong)


# ---- options ---------------------------------------------------------------------------------------------------------


class Counted(Recorder):
    """Has a layer that only some batches use, a buffer that ranks change differently, and notes what DDP reduced."""

    def __init__(self, use: str = "never") -> None:
        super().__init__()
        self.use = use
        torch.manual_seed(0)
        self.extra = nn.Linear(2, 2)
        self.bare = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))
        self.gradients: list[dict[str, Tensor]] = []
        self.buffers_seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.buffers_seen.append(float(self.seen))
        self.seen += self.trainer.global_rank + 1
        loss = super().training_step(batch, batch_idx) * self.bare
        used = self.use == "always" or (self.use == "sometimes" and batch_idx % 2 == 0)
        return loss + self.extra(torch.ones(2)).sum() if used else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: whole(p.grad) for name, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_with(
    options: dict[str, Any], use: str, hook: Any = None, precision: Any = "32-true", **more: Any
) -> dict[str, Any]:
    calls: list[int] = []

    def counting(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        return hook(state, bucket)

    strategy = DDPStrategy(DDPConfig(**options), ddp_comm_hook=hook and counting, **more)
    module = Counted(use)
    run = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=2, precision=precision)
    run.fit(module, batches(world_size()))
    assert run.strategy.model is module  # unwrapped
    return {
        "gradients": module.gradients,
        "parameters": whole_parameters(module),
        "buckets": calls,
        "seen": module.buffers_seen,
    }


def worst(many: dict[str, Any], one: dict[str, Any]) -> float:
    assert len(many["gradients"]) == len(one["gradients"])
    pairs = [*zip(many["gradients"], one["gradients"], strict=True), (many["parameters"], one["parameters"])]
    assert all(a.keys() == b.keys() for a, b in pairs)
    return max(float((a[n] - b[n]).norm() / b[n].norm().clamp(min=1e-3)) for a, b in pairs for n in b)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"find_unused_parameters": True}, "never"),
    ({"find_unused_parameters": True}, "sometimes"),
    ({"static_graph": True, "gradient_as_bucket_view": True}, "always"),
    ({"bucket_cap_mb": 0.01, "broadcast_buffers": True}, "always"),
]


def fit_all() -> list[dict[str, Any]]:
    return [fit_with(options, use) for options, use in OPTIONS]


def test_options_are_exact(nursery: Nursery, pool2: Pool) -> None:
    expected = Pool(nursery, 1).run(fit_all, trainer=True)[0]
    first, second = pool2.run(fit_all, trainer=True)
    for ranks in (first, second):
        for many, one, (options, _) in zip(ranks, expected, OPTIONS, strict=True):
            assert worst(many, one) < 1e-5, options
    assert first[3]["seen"] == [0, 1, 2, 3]
    assert second[0]["seen"] == [0, 2, 4, 6]
    assert second[3]["seen"] == [0, 2, 2, 4]  # rank 0's at the start of each step


def fit_unused() -> str:
    with pytest.raises(RuntimeError) as caught:
        fit_with({}, "never")
    return str(caught.value)


def test_an_unused_parameter_is_an_error_that_helps(pool2: Pool) -> None:
    assert "DDPConfig(find_unused_parameters=True)" in pool2.run(fit_unused, trainer=True)[0]


def fit_hooks() -> dict[str, Any]:
    averaged = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
    return {
        "plain": fit_with({}, "always"),
        "counted": fit_with({"bucket_cap_mb": 100}, "always", allreduce_hook),
        "narrow": fit_with({}, "always", fp16_compress_hook),
        "averaged": fit_with({}, "always", post_localSGD_hook, ddp_comm_state=averaged, model_averaging_period=1),
    }


def test_hooks_and_what_is_reduced(pool2: Pool) -> None:
    first, second = pool2.run(fit_hooks, trainer=True)
    for name in first:
        assert all(value.equal(second[name]["parameters"][key]) for key, value in first[name]["parameters"].items())
    assert first["counted"]["buckets"] == [0, 0]  # 4 micro-batches, 2 optimizer steps
    assert worst(first["counted"], first["plain"]) < 1e-6
    assert worst(first["averaged"], first["plain"]) < 1e-6
    assert 0 < worst(first["narrow"], first["plain"]) < 1e-2


# ---- which parameters train ------------------------------------------------------------------------------------------


class Chooses(Noted):
    """Trains other layers in each micro-batch, as a callback or its own step chooses."""

    def __init__(self, in_step: bool) -> None:
        super().__init__()
        self.in_step = in_step

    def choose(self, batch_idx: int) -> None:
        for number, layer in enumerate(self.model.model.layers):
            layer.requires_grad_((batch_idx + number) % 3 != 0)

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        if not self.in_step:
            self.choose(batch_idx)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.in_step:
            self.choose(batch_idx)
        return super().training_step(batch, batch_idx)


class ChoosesByHand(Chooses):
    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]


CHOICES = [(Chooses, in_step, count) for in_step in (False, True) for count in (1, 2)] + [(ChoosesByHand, True, 1)]


def choose_all() -> list[list[dict[str, Tensor]]]:
    """Runs on each rank: gradients of each step."""
    found = []
    for kind, in_step, count in CHOICES:
        module = kind(in_step)
        strategy = DDPStrategy() if world_size() > 1 else "auto"
        run = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=count)
        run.fit(module, batches(world_size()))
        found.append(module.gradients)
    return found


@pytest.mark.slow
def test_what_trains_in_each_micro_batch_may_change(nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(choose_all, trainer=True)
    for actual in pool2.run(choose_all, trainer=True):
        for many, one in zip(actual, expected, strict=True):
            for found, gradients in zip(many, one, strict=True):
                assert found.keys() == gradients.keys()
                check_gradients(gradients, found)


# ---- steps by hand ---------------------------------------------------------------------------------------------------


class InTurn(Noted):
    """Trains a judge on what the model says, then the model against the judge, which is frozen meanwhile."""

    automatic_optimization = False

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            torch.manual_seed(0)
            self.judge = nn.Linear(VOCABULARY, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        of_model, of_judge = self.optimizers()  # type: ignore[misc]
        output = self.model(input_ids=batch[0], labels=batch[0])
        self.judge.requires_grad_(True)
        self._step(of_judge, self.judge(output.logits.detach()).square().mean())
        self.judge.requires_grad_(False)
        self._step(of_model, output.loss + self.judge(output.logits).square().mean())

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.3) for part in (self.model, self.judge)]


class PlainBackward(InTurn):
    """Goes back by methods of tensors; the first micro-batch of a step stays on its rank, and a layer is frozen."""

    def on_fit_start(self) -> None:
        self.model.model.norm.requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()[0]  # type: ignore[index]
        is_first, strategy = batch_idx % 2 == 0, self.trainer.strategy
        self.model.model.norm.requires_grad_(not is_first)
        with strategy.block_backward_sync() if is_first and world_size() > 1 else nullcontext():  # type: ignore[attr-defined]
            self.loss(batch).backward()
        if not is_first:
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()


def fit_by_hand(kind: type[InTurn], find_unused: bool) -> dict[str, Any]:
    module = kind()
    strategy = DDPStrategy(DDPConfig(find_unused_parameters=find_unused)) if world_size() > 1 else "auto"
    make_trainer(strategy, max_epochs=1).fit(module, batches(world_size()))
    assert not any(hooks_after_accumulation(parameter) for parameter in module.parameters())
    return {"gradients": module.gradients, "parameters": whole_parameters(module)}


@pytest.mark.parametrize("kind", [InTurn, PlainBackward])
def test_steps_by_hand_are_exact(kind: type[InTurn], nursery: Nursery, pool2: Pool) -> None:
    find_unused = kind is InTurn
    (expected,) = Pool(nursery, 1).run(fit_by_hand, kind, find_unused, trainer=True)
    for found in pool2.run(fit_by_hand, kind, find_unused, trainer=True):
        assert worst(found, expected) < 1e-5


class LastUnused(Counted):
    """Leaves a layer unused in its one step, behind which torch would say nothing any more."""

    def on_train_batch_end(self, *args: Any) -> None:
        raise AssertionError("the step was taken")


def fit_in_part() -> list[str]:
    found = []
    for module in (LastUnused(), InTurn()):
        with pytest.raises(RuntimeError) as caught:
            make_trainer(DDPStrategy(), max_steps=2, limit_train_batches=1).fit(module, batches(2))
        found.append(str(caught.value))
        assert module.gradients == []
    return found


def test_no_step_is_taken_with_what_a_rank_has(pool2: Pool) -> None:
    assert all(
        "find_unused_parameters=True" in text for ranks in pool2.run(fit_in_part, trainer=True) for text in ranks
    )


# ---- precision -------------------------------------------------------------------------------------------------------


def fit_precisions(ours: bool, **levers: Any) -> dict[str, dict[str, Any]]:
    results = {}
    for precision in ("32-true", "bf16-true", "bf16-mixed", "16-mixed"):
        module = Descending()
        strategy = DDPStrategy(DDPConfig(**levers)) if ours else FSDP2TPStrategy()
        make_trainer(strategy, max_epochs=1, precision=precision).fit(module, batches(world_size()))  # type: ignore[arg-type]
        dtype = module.model.model.rotary_emb.inv_freq.dtype
        results[precision] = {"losses": module.losses, "parameters": whole_parameters(module), "buffer": dtype}
    return results


@pytest.mark.slow
def test_precision_is_that_of_fsdp2(pool4: Pool) -> None:
    """With four ranks, sums in bfloat16 would differ from those in float32."""
    ddp, fsdp2 = (pool4.run(fit_precisions, ours, trainer=True)[0] for ours in (True, False))
    for precision, expected in fsdp2.items():
        assert ddp[precision]["losses"] == pytest.approx(expected["losses"], rel=1e-6), precision
        assert ddp[precision]["buffer"] == torch.float32
        for name, value in expected["parameters"].items():
            actual = ddp[precision]["parameters"][name]
            assert actual.dtype == value.dtype
            assert (actual - value).norm() <= 1e-6 * value.norm(), (precision, name)
    again = pool4.run(fit_precisions, True, activation_checkpointing="full", trainer=True)[0]
    assert all(again[precision]["losses"] == ddp[precision]["losses"] for precision in ddp)
    assert ddp["bf16-mixed"]["losses"] != pytest.approx(ddp["32-true"]["losses"], rel=1e-6)


# ---- loading ---------------------------------------------------------------------------------------------------------


class Loading(Recorder):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(dist.get_rank())  # what the files lack is drawn
            self.model = AutoModelForCausalLM.from_pretrained(self.path).train()

    def on_train_start(self) -> None:
        self.loaded = {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def load(path: Path, everywhere: bool) -> tuple[int, dict[str, Tensor], list[float]]:
    """Files that this rank opened, the weights before training, and losses."""
    opened = []
    original = file_slices.safe_open

    def counting(file: str, *args: Any, **kwargs: Any) -> Any:
        opened.append(file)
        return original(file, *args, **kwargs)

    file_slices.safe_open = counting
    module = Loading(path)
    run = make_trainer(DDPStrategy(DDPConfig(read_weights_on_all_ranks=everywhere)), max_epochs=1)
    run.fit(module, batches(world_size()))
    assert module.model.lm_head.weight is not module.model.model.embed_tokens.weight
    return len(opened), module.loaded, module.losses


def load_broken(path: Path) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of two kinds
        make_trainer(DDPStrategy(), max_epochs=1).fit(Loading(path), batches(world_size()))
    return str(caught.value)


def test_one_rank_of_a_node_reads(pool2: Pool, tmp_path: Path) -> None:
    path = save_families(tmp_path) / "qwen3"
    file = path / "model.safetensors"
    stored = load_file(file)
    del stored["lm_head.weight"]
    save_file(stored, file, metadata={"format": "pt"})
    for everywhere in (False, True):
        ranks = pool2.run(load, path, everywhere, trainer=True)
        assert [opened for opened, *_ in ranks] == [1, int(everywhere)]
        for _, loaded, _ in ranks:
            assert all(loaded[name].equal(value) for name, value in stored.items())
            assert loaded["lm_head.weight"].equal(ranks[0][1]["lm_head.weight"])
            assert loaded["lm_head.weight"].std() == pytest.approx(0.02, rel=0.2)
        assert ranks[0][2] == ranks[1][2]
    file.write_bytes(file.read_bytes()[:500])
    reader, other = pool2.run(load_broken, path, trainer=True)
    assert "reads the weights for this one failed" in other
    assert reader[:40] in other


# ---- one module under several strategies -----------------------------------------------------------------------------


def change_strategy() -> str:
    module = Recorder()
    make_trainer(DDPStrategy(), max_steps=1).fit(module, batches(2))
    make_trainer(FSDP2TPStrategy(), max_steps=1).fit(module, batches(2))
    with pytest.raises(ValueError, match="made parallel by another strategy") as caught:
        make_trainer(DDPStrategy(), max_steps=1).fit(module, batches(2))
    return str(caught.value)


def test_replicas_can_be_sharded_but_not_the_other_way(pool2: Pool) -> None:
    assert "build a new LightningModule" in pool2.run(change_strategy, trainer=True)[0]
