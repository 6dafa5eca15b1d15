"""What only Megatron-FSDP has: its switches, its traps, and loops without Lightning. On gloo, through a stand-in."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_automodel import FSDP2TPStrategy, MegatronFSDPConfig, MegatronFSDPStrategy
from lightning_automodel.distributed.shards import gather_on_rank_zero
from lightning_automodel.distributed.uneven_shards import as_stored
from lightning_automodel.megatron import accumulating, clip_grad_norm_
from lightning_automodel.parallelizer import megatron_fsdp_strategy_parallelize, nvfsdp_strategy_parallelize
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support import cuda_on_cpu
from tests.support.marks import with_long
from tests.support.subjects import SIZES, VOCABULARY
from tests.support.training import Descending, Recorder, batches, make_trainer, rows, tiny_llama, world_size

# ---- without processes -----------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"overlap_grad_reduce": False}, "wrong gradients"),
    ({"overlap_param_gather": False}, "wrong gradients"),
    ({"average_in_collective": True}, "wrong means"),
    ({"sequence_parallel": True}, "FSDP2TPStrategy"),
    ({"init_fsdp_with_meta_device": True}, "loaded before they are sharded"),
    ({"keep_fp8_transpose_cache": True}, "transformer_engine"),
    ({"nccl_ub": True, "backend": "gloo"}, "NCCL"),
    ({"fsdp_double_buffer": True, "zero_dp_strategy": 2}, "zero_dp_strategy=3"),
    ({"zero_dp_strategy": 4}, "0, 1, 2 or 3"),
    ({"chunked_loss": 0}, "at least 1"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=lambda value: next(iter(value)) if value else "")
def test_fields_that_cannot_be(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        MegatronFSDPConfig(**fields)


@pytest.mark.parametrize("size", ["cp", "pp", "ep", "dp_replicate"])
def test_other_axes_are_refused(size: str) -> None:
    with pytest.raises(ValueError, match=rf"MegatronFSDPStrategy\({size}=2\)"):
        MegatronFSDPStrategy(**{size: 2})  # type: ignore[arg-type]


def test_a_machine_without_cuda_is_refused() -> None:
    with pytest.raises(ValueError, match="needs CUDA devices, and this is 'cpu'; use FSDP2TPStrategy"):
        make_trainer_of(MegatronFSDPStrategy())


def make_trainer_of(strategy: Any, **arguments: Any) -> Any:
    os.environ.setdefault("WORLD_SIZE", "1")
    return make_trainer(strategy, **arguments)


# ---- precision -------------------------------------------------------------------------------------------------------


def fit_precision(ours: bool, precision: str, **fields: Any) -> dict[str, Any]:
    cuda_on_cpu.install()
    module = Descending()
    strategy = MegatronFSDPStrategy(config=MegatronFSDPConfig(**fields)) if ours else FSDP2TPStrategy()
    make_trainer(strategy, max_epochs=1, precision=precision).fit(module, batches(world_size()))
    parameters = {name: gather_on_rank_zero(as_stored(p)) for name, p in module.named_parameters()}
    return {"losses": module.losses, "parameters": parameters}


@pytest.mark.long
def test_precision_is_that_of_fsdp2(pool2: Pool) -> None:
    """With gradients reduced in float32, main weights in float32 and compute in bfloat16: to the last digit."""
    cases: dict[str, dict[str, Any]] = {"bf16-mixed": {}, "bf16-true": {}}
    for precision, fields in cases.items():
        expected = pool2.run(fit_precision, False, precision, trainer=True)[0]
        for stage, mode in ((1, False), (3, "full")):
            more = {"zero_dp_strategy": stage, "activation_checkpointing": mode, **fields}
            actual = pool2.run(fit_precision, True, precision, **more, trainer=True)[0]
            assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-3), precision
            for name, value in expected["parameters"].items():
                assert actual["parameters"][name].dtype == value.dtype
                bound = 1e-4 if precision == "bf16-mixed" else 1e-2
                assert (actual["parameters"][name] - value).norm() <= bound * value.norm(), (precision, name)


def accumulate(stage: int | None) -> dict[str, Any]:
    """Runs on each rank: the change by one step of 128 equal micro-batches."""
    cuda_on_cpu.install()
    module = Descending()
    config = MegatronFSDPConfig(zero_dp_strategy=stage or 0)
    strategy = FSDP2TPStrategy() if stage is None else MegatronFSDPStrategy(config=config)
    run = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=128, precision="bf16-mixed")
    run.fit(module, DataLoader(TensorDataset(rows(1).repeat(128 * world_size(), 1))))
    before = dict(tiny_llama().named_parameters(prefix="model"))
    after = {name: gather_on_rank_zero(as_stored(p)) for name, p in module.named_parameters()}
    return {name: value - before[name].detach() for name, value in after.items() if value is not None}


@pytest.mark.slow
@pytest.mark.parametrize("stage", with_long([1, 3], 3))
def test_the_sum_of_many_micro_batches_is_wide(stage: int, pool2: Pool) -> None:
    """In bfloat16 it was 0.05 off and more."""
    expected, actual = (pool2.run(accumulate, of, trainer=True)[0] for of in (None, stage))
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= 1e-2 * value.norm(), name


def narrow(ours: bool, tp: int) -> dict[str, Any]:
    cuda_on_cpu.install()
    module = Descending()
    config = MegatronFSDPConfig(grad_reduce_in_fp32=True)
    strategy = MegatronFSDPStrategy(tp=tp, config=config) if ours else FSDP2TPStrategy(tp=tp)
    data = batches(world_size() // tp)
    make_trainer(strategy, max_epochs=1, accumulate_grad_batches=2, precision="bf16-true").fit(module, data)
    return {name: gather_on_rank_zero(as_stored(p)) for name, p in module.named_parameters()}


@pytest.mark.parametrize("tp", [1, 2])
def test_narrow_gradients_are_reduced_wide(tp: int, pool2: Pool) -> None:
    """Torch refused the wide sums; the library adds what one data rank casts for its reduction to itself."""
    expected, actual = (pool2.run(narrow, ours, tp, trainer=True)[0] for ours in (False, True))
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= 1e-2 * value.norm(), name


# ---- what trains -----------------------------------------------------------------------------------------------------


class Changing(Descending):
    """Freezes all but the first block, or nothing, and changes its mind in the second epoch."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.is_frozen = is_frozen

    def configure_model(self) -> None:
        super().configure_model()
        if self.current_epoch == 0:
            self.model.model.layers[1].requires_grad_(not self.is_frozen)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.model.model.layers[1].requires_grad_(self.is_frozen)


class WithinStep(Recorder):
    """Freezes a block for the second micro-batch of a step."""

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        self.model.model.layers[1].requires_grad_(batch_idx % 2 == 0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.model.model.layers[1].requires_grad_(True)


class AroundForward(Recorder):
    """Freezes a block for one of two losses."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.model.model.layers[1].requires_grad_(False)
        without = super().loss(batch)
        self.model.model.layers[1].requires_grad_(True)
        return without + super().loss(batch)


def change(kind: Callable[[], Recorder], stage: int, micro_batches: int) -> tuple[str, int]:
    cuda_on_cpu.install()
    module = kind()
    strategy = MegatronFSDPStrategy(config=MegatronFSDPConfig(zero_dp_strategy=stage))
    run = make_trainer(strategy, max_epochs=2, accumulate_grad_batches=micro_batches)
    try:
        run.fit(module, batches(world_size()))
    except ValueError as error:
        return str(error), run.current_epoch
    return "", run.current_epoch


@pytest.mark.parametrize(
    ("kind", "stage", "word", "begun"),
    [
        (partial(Changing, True), 3, "unfrozen", 1),
        (partial(Changing, False), 3, "frozen", 1),
        (WithinStep, 3, "frozen", 0),
        (WithinStep, 1, "frozen", 0),
        (AroundForward, 3, "frozen", 0),
        (AroundForward, 1, "frozen", 0),
    ],
)
def test_what_trains_stays_what_trains(
    kind: Callable[[], Recorder], stage: int, word: str, begun: int, pool2: Pool
) -> None:
    for message, epoch in pool2.run(change, kind, stage, 2, trainer=True):
        assert f"model.layers.1.input_layernorm.weight was {word} after Megatron-FSDP had sharded it" in message
        assert epoch == begun


# ---- steps by hand ---------------------------------------------------------------------------------------------------


class ByHand(Recorder):
    """Two backward passes per step, cleared in two ways; two optimizers that take turns."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        half = len(batch[0]) // 2
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(super().loss([batch[0][:half]]) / 2)
        loss = super().loss([batch[0][half:]])
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        self.manual_backward(loss / 2)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        for each in self.optimizers():  # type: ignore[union-attr]
            each.zero_grad(set_to_none=batch_idx % 2 == 0)
        return loss

    def configure_optimizers(self) -> Any:
        embedding = self.model.model.embed_tokens.weight
        others = [p for p in self.parameters() if p is not embedding]
        return torch.optim.SGD([embedding], lr=0.1), torch.optim.SGD(others, lr=0.1, momentum=0.9)


def step_by_hand(stage: int | None, tp: int = 1) -> list[float]:
    module = ByHand()
    strategy: Any = FSDP2TPStrategy()
    if stage is not None:
        cuda_on_cpu.install()
        config = MegatronFSDPConfig(zero_dp_strategy=stage, report_nan_in_param_grad=stage == 2)
        strategy = MegatronFSDPStrategy(tp=tp, config=config)
    make_trainer(strategy, max_epochs=2).fit(module, batches(world_size() // tp))
    return module.losses


@pytest.mark.slow
def test_optimization_by_hand(pool2: Pool) -> None:
    expected = pool2.run(step_by_hand, None, trainer=True)[0]
    for stage in range(4):
        assert pool2.run(step_by_hand, stage, trainer=True)[0] == pytest.approx(expected, rel=1e-5), stage


class NotFinite(Recorder):
    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) * float("nan")


def meet_errors() -> str:
    cuda_on_cpu.install()
    with pytest.raises(ValueError, match="precision='16-mixed'"):
        make_trainer(MegatronFSDPStrategy(), precision="16-mixed", max_epochs=1).fit(Recorder(), batches(world_size()))
    with pytest.raises(ValueError, match="gradient") as caught:
        make_trainer(MegatronFSDPStrategy(), max_epochs=1).fit(NotFinite(), batches(world_size()))
    return str(caught.value)


def test_errors_that_help(pool2: Pool) -> None:
    for not_finite in pool2.run(meet_errors, trainer=True):
        assert "check_for_nan_in_grad=False" in not_finite


# ---- compile ---------------------------------------------------------------------------------------------------------


PASSES = 2  # over the logits of the loss


def fit_compiled(compiled: bool, stage: int, tp: int = 1, **fields: Any) -> tuple[list[float], int]:
    cuda_on_cpu.install()
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    if compiled:
        fields |= {"enable_compile": True, "compile_backend": graphs}
    strategy = MegatronFSDPStrategy(tp=tp, config=MegatronFSDPConfig(zero_dp_strategy=stage, **fields))
    module = ByHand()
    make_trainer(strategy, max_epochs=2).fit(module, batches(world_size() // tp))
    return module.losses, graphs.frame_count


@pytest.mark.long
def test_compiled_blocks(pool2: Pool) -> None:
    for stage, tp, mode in ((1, 1, False), (3, 1, "full"), (3, 2, False)):
        fields = {"activation_checkpointing": mode, "trainer": True}
        losses, _ = pool2.run(fit_compiled, False, stage, tp, **fields)[0]
        compiled, graphs = pool2.run(fit_compiled, True, stage, tp, **fields)[0]
        assert compiled == pytest.approx(losses, rel=1e-5), (stage, tp)
        assert 1 <= graphs - PASSES <= 2, (stage, tp)  # blocks share theirs


# ---- loops of one's own ----------------------------------------------------------------------------------------------


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=True))


def loop(stage: int | None, tp: int = 1, **fields: Any) -> tuple[list[float], dict[str, Tensor | None]]:
    """Four steps of two micro-batches with clipping; without a stage on one process."""
    model, data_rank, data_size = build(), 0, 1
    embedding = model.get_input_embeddings().weight
    others = [p for p in model.parameters() if p is not embedding]
    optimizer: Any = torch.optim.AdamW([{"params": [embedding], "lr": 1e-2}, {"params": others}], lr=1e-3)
    if stage is not None:
        cuda_on_cpu.install()
        dp = dist.get_world_size() // tp
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        data_rank, data_size = mesh["dp"].get_local_rank(), dp
        model, optimizer = megatron_fsdp_strategy_parallelize(model, mesh, optimizer, zero_dp_strategy=stage, **fields)
    ids = torch.randint(VOCABULARY, (4, 2, 2, 8), generator=torch.Generator().manual_seed(0))
    share = data_size if fields.get("calculate_per_token_loss") else 1  # gradients are then summed
    norms = []
    for step in ids:
        for i, micro in enumerate(step):
            rows = micro[data_rank::data_size]
            if stage is not None and i == 0:
                with accumulating(model):
                    (model(input_ids=rows, labels=rows).loss / 2 / share).backward()
            else:
                (model(input_ids=rows, labels=rows).loss / 2 / share).backward()
        stock = torch.nn.utils.clip_grad_norm_
        norm = stock(model.parameters(), 0.5) if stage is None else clip_grad_norm_(model, 0.5)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    whole = {
        n: gather_on_rank_zero(as_stored(p)) if stage is not None else p.detach() for n, p in model.named_parameters()
    }
    return norms, whole


LOOPS: list[tuple[int, int, dict[str, Any]]] = [
    (0, 1, {}),
    (1, 1, {"disable_bucketing": True}),
    (2, 1, {"calculate_per_token_loss": True}),
    (3, 2, {"megatron_fsdp_unit_modules": ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]}),
]


@pytest.mark.slow
def test_a_plain_loop(nursery: Nursery, pool2: Pool) -> None:
    norms, parameters = Pool(nursery, 1).run(loop, None)[0]
    for stage, tp, fields in LOOPS:
        found, whole = pool2.run(loop, stage, tp, **fields)[0]
        assert found == pytest.approx(norms, rel=1e-5), (stage, tp)
        assert whole.keys() == parameters.keys()
        for name, value in parameters.items():
            assert (whole[name] - value).abs().max() < 1e-5, (stage, tp, name)


def deprecated() -> str:
    cuda_on_cpu.install()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.warns(DeprecationWarning, match="megatron_fsdp_strategy_parallelize"):
        model, optimizer = nvfsdp_strategy_parallelize(build(), mesh, data_parallel_sharding_strategy="optim")
    assert optimizer is None
    with pytest.raises(ValueError, match="LlamaForCausalLM was made parallel already"):
        megatron_fsdp_strategy_parallelize(model, mesh)
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    return type(next(model.parameters())).__name__


def test_the_old_spelling(pool2: Pool) -> None:
    assert pool2.run(deprecated) == ["DTensor", "DTensor"]
