"""What peft adds to single parameters: rows pass through factors of experts; graphs hold it; peft's own numbers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.adapted import adapted, adapter_error, with_adapter
from tests.support.comparison import Schedule
from tests.support.families import tiny_model

BOUND = 1e-5
SCHEDULE = Schedule(steps=2, length=12)
GRAPHS: dict[str, Any] = {"enable_compile": True, "compile_backend": "aot_eager"}
FAMILIES = ("qwen3_moe", "gpt_oss")  # [out, in]; [in, out] with biases


@pytest.fixture(scope="module")
def pool1(nursery: Nursery) -> Pool:
    return Pool(nursery, 1)


def in_graphs(cases: list[tuple[str, str]], sizes: dict[str, int], config: dict[str, Any]) -> dict[str, Any]:
    """Runs on each rank: the largest error of each family and method against one eager process."""
    return {
        f"{family}, {method}": adapter_error(family, method, sizes, SCHEDULE, FSDP2Config(**config))
        for family, method in cases
    }


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["full", pytest.param(False, marks=pytest.mark.long)])
def test_graphs_hold_them(checkpointing: str | bool, pool2: Pool) -> None:
    cases = [("qwen3_moe", "experts"), ("llama", "table")]
    for found in pool2.run(in_graphs, cases, {"tp": 2}, {**GRAPHS, "activation_checkpointing": checkpointing}):
        assert {case: error for case, error in found.items() if error[0] > BOUND} == {}


# ---- one process -----------------------------------------------------------------------------------------------------


class Sizes(TorchDispatchMode):
    """Notes the size of every result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view and out is not args[0]:  # FSDP2 copies what it gathers
            self.seen.append(out.numel())
        return out


def gradients(model: PeftModel, ids: Tensor) -> dict[str, Tensor]:
    """Of all that trains, whole."""
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def both(family: str, **changes: Any) -> tuple[PeftModel, PeftModel]:
    """A model as peft has it, and the same as a mesh of one rank has it."""
    plain, ours = (adapted(family, "experts", **changes) for _ in range(2))
    parallelize(ours.get_base_model(), build_mesh(resolve_sizes(1), "cpu"))
    return plain, ours


def ids_for(model: PeftModel) -> Tensor:
    return torch.randint(model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))


def made_of_all_experts(family: str) -> tuple[int, int]:
    """Runs on a rank: how many results of the size of all experts, or more, a step has in peft, and here."""
    counts = []
    for model in both(family, num_experts=16, num_local_experts=16, n_routed_experts=16):
        ids, stacked = ids_for(model)[:1, :4], [p for n, p in model.named_parameters() if "experts.down_proj" in n]
        smallest = min(p.numel() for p in stacked or model.parameters() if p.ndim == 3)
        with Sizes() as sizes:
            gradients(model, ids)
        counts.append(sum(size >= smallest for size in sizes.seen))
    return counts[0], counts[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_all_experts_are_not_added_up(family: str, pool1: Pool) -> None:
    [(in_peft, here)] = pool1.run(made_of_all_experts, family)
    assert in_peft > 0
    assert here == 0


def no_adapter(model: PeftModel) -> AbstractContextManager:
    return model.disable_adapter()


def use_second(model: PeftModel) -> AbstractContextManager:
    _add_second(model)
    model.set_adapter("second")
    return nullcontext()


def use_two(model: PeftModel) -> AbstractContextManager:
    _add_second(model)
    model.base_model.set_adapter(["default", "second"])
    return nullcontext()


def merge(model: PeftModel) -> AbstractContextManager:
    model.merge_adapter()
    return nullcontext()


def _add_second(model: PeftModel) -> None:
    model.add_adapter("second", model.peft_config["default"])
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".second." in name:
            nn.init.normal_(parameter, std=0.05)


STATES: dict[str, Callable[[PeftModel], AbstractContextManager]] = {
    "as it is": lambda model: nullcontext(),
    "no adapter": no_adapter,
    "second": use_second,
    "two": use_two,
    "merged": merge,
}


def state_error(state: str, kernel: str) -> float:
    """Runs on a rank: the largest relative difference of the loss and of a gradient from peft's."""
    plain, ours = (adapted("qwen3_moe", "experts") for _ in range(2))
    contexts = [STATES[state](model) for model in (plain, ours)]
    parallelize(ours.get_base_model(), build_mesh(resolve_sizes(1), "cpu"))
    worst = 0.0
    for model in (plain, ours):
        model.get_base_model().set_experts_implementation(kernel)
    with contexts[0], contexts[1]:
        ids = ids_for(plain)
        losses = [float(model(input_ids=ids, labels=ids).loss.detach()) for model in (plain, ours)]
        if state not in ("no adapter", "merged"):
            expected, found = gradients(plain, ids), gradients(ours, ids)
            assert expected.keys() == found.keys() != set()
            worst = max(float((found[n] - g).norm() / (g.norm() + 1e-6)) for n, g in expected.items())
    return max(worst, abs(losses[0] - losses[1]) / losses[0])


@pytest.mark.parametrize("kernel", ["grouped_mm", "eager", pytest.param("batched_mm", marks=pytest.mark.long)])
@pytest.mark.parametrize("state", STATES)
def test_states_of_peft(state: str, kernel: str, pool1: Pool) -> None:
    assert max(pool1.run(state_error, state, kernel)) < BOUND


# ---- code of a user's own --------------------------------------------------------------------------------------------


def subclass(experts: nn.Module) -> None:
    kind = type(experts)
    halved = {"forward": lambda self, *args: kind.forward(self, *args) * 0.5}
    experts.__class__ = type("Halved", (kind,), halved)


def assign(experts: nn.Module) -> None:
    whole = experts.forward
    experts.forward = MethodType(lambda self, *args: whole(*args) * 0.5, experts)


def error_of(plain: nn.Module, ours: nn.Module, ids: Tensor) -> float:
    expected, found = gradients(plain, ids), gradients(ours, ids)
    assert expected.keys() == found.keys() != set()
    return max(float((found[n] - g).norm() / (g.norm() + 1e-6)) for n, g in expected.items())


def own_code_error(change: Callable[[nn.Module], None]) -> float:
    """Runs on a rank: the largest error of a gradient, with code around the grouped products."""
    bases = [tiny_model("mixtral", experts="grouped_mm") for _ in range(2)]
    for base in bases:
        for layer in base.model.layers:
            change(layer.mlp.experts)
    plain, ours = (with_adapter(base, "experts") for base in bases)
    parallelize(ours.get_base_model(), build_mesh(resolve_sizes(1), "cpu"))
    return error_of(plain, ours, ids_for(plain))


@pytest.mark.parametrize("change", [subclass, assign])
def test_code_around_grouped_products_runs(change: Callable[[nn.Module], None], pool1: Pool) -> None:
    assert max(pool1.run(own_code_error, change)) < BOUND


def losses_without_wrappers() -> list[float]:
    """Runs on a rank: the losses of peft and of a mesh, once adapters are taken away again."""
    models = [adapted("mixtral", "experts") for _ in range(2)]
    parallelize(models[1].get_base_model(), build_mesh(resolve_sizes(1), "cpu"))
    models[1].get_base_model().set_experts_implementation("grouped_mm")
    ids = ids_for(models[0])
    return [float(model.unload()(input_ids=ids, labels=ids).loss) for model in models]


def test_unloaded_adapters_add_nothing(pool1: Pool) -> None:
    [(expected, found)] = pool1.run(losses_without_wrappers)
    assert found == pytest.approx(expected, rel=1e-6)


class Mixing(nn.Module):
    """A user's own, which reads one of its parameters two times."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.stacked = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(4, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.flat @ (self.stacked[1] + self.stacked.mean())


class Net(nn.Module):
    """Has no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.last = Mixing(), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = functional.one_hot(input_ids, 8).float()
        return SimpleNamespace(loss=functional.mse_loss(self.last(self.mixing(x)), x))


def own_parameters_error() -> float:
    """Runs on a rank: the largest error of a gradient of a user's own module."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = LoraConfig(r=3, target_modules=["last"], target_parameters=["mixing.flat", "mixing.stacked"])
        models.append(get_peft_model(Net(), config, autocast_adapter_dtype=False))  # type: ignore[arg-type]
        for parameter in models[-1].parameters():
            nn.init.normal_(parameter)
    parallelize(models[1].base_model.model, build_mesh(resolve_sizes(1), "cpu"))
    return error_of(*models, torch.arange(8)[None])


def test_parameters_of_a_module_of_ones_own(pool1: Pool) -> None:
    assert max(pool1.run(own_parameters_error)) < BOUND
