"""Each private name of others that the package uses, one test each: a new release that lacks it fails here by name."""

import ast
import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch
import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_automodel import mesh as meshes
from lightning_automodel._compat.dtensor.gradients import see_to_gradients_of_local
from lightning_automodel._compat.dtensor.tensors import strided_shard
from lightning_automodel._compat.fsdp2 import units as fsdp2
from lightning_automodel._compat.fsdp2.reduction import reduce_what_any_rank_has
from lightning_automodel._compat.fsdp2.units import parameter_groups
from lightning_automodel._compat.torch.modules import lay_hooks_in_order
from lightning_automodel._compat.transformers.models import recorded_outputs
from lightning_automodel.config import FSDP2Config
from lightning_automodel.loss.model_losses import _LOSSES
from lightning_automodel.modules.reachable_code import names_in_code
from lightning_automodel.parallel.fsdp2.sharding import needs_no_sharding
from lightning_automodel.plans import context
from lightning_automodel.testing.pool import Pool
from tests.compat.names import ATTRIBUTES, COMPAT, PACKAGE, PARAMETERS
from tests.plans.support import build_llama
from tests.support.families import tiny_model

VERSIONS = f"torch {torch.__version__}, lightning {lightning.__version__}, transformers {transformers.__version__}"


def find(path: str) -> Any:
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    asked = {constant for constant in code.co_consts if isinstance(constant, str)}  # by getattr
    return asked.union(code.co_names, *map(names_in, inner))


def knows(owner: Any, name: str) -> bool:
    if hasattr(owner, name):
        return True
    kinds = inspect.getmro(owner) if inspect.isclass(owner) else ()
    functions = [f for kind in kinds for f in vars(kind).values() if inspect.isfunction(f)]
    functions += [owner] if inspect.isfunction(owner) else []
    return any(name in names_in(inspect.unwrap(f).__code__) for f in functions)


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in ATTRIBUTES.items() for name in names])
def test_attribute(owner: str, name: str) -> None:
    assert knows(find(owner), name), f"{owner} has lost {name} in one of {VERSIONS}"


@pytest.mark.parametrize("function", PARAMETERS)
def test_parameters(function: str) -> None:
    found = list(inspect.signature(inspect.unwrap(find(function))).parameters)
    assert found == PARAMETERS[function], f"{function} has changed in one of {VERSIONS}"


def imported() -> Iterator[tuple[str, str]]:
    for path in COMPAT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                library = node.module.partition(".")[0]
                if library in ("lightning", "torch", "transformers"):
                    yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize(("module", "name"), sorted(set(imported())))
def test_import(module: str, name: str) -> None:
    found = importlib.import_module(module)
    if not hasattr(found, name):
        importlib.import_module(f"{module}.{name}")


# ---- what the code of others tells -----------------------------------------------------------------------------------


def test_the_loss_is_found_in_the_code_of_a_model() -> None:
    model = build_llama()
    assert "loss_function" in names_in(inspect.unwrap(type(model).forward).__code__)
    assert model.loss_function in _LOSSES


def test_heads_are_found_in_the_code_of_an_attention() -> None:
    attention = build_llama().model.layers[0].self_attn
    assert "head_dim" in names_in_code(attention)


def test_attention_that_works_on_rows_is_found_in_its_code() -> None:
    model = build_llama()
    layer = model.model.layers[0]
    assert context.REGISTRY in context.names_of(layer.self_attn)
    assert context.treatment_of(layer.self_attn) is context.Treatment.ATTENTION
    assert context.treatment_of(layer.mlp) is context.Treatment.TOKENWISE
    assert {"attention_mask", "position_embeddings"} <= context.handed_to_children(layer)
    assert context.hands_on(model, "model")


def test_recorded_router_logits_are_found_in_the_hooks_of_a_model() -> None:
    model = tiny_model("mixtral")
    names = [name for name, *_ in recorded_outputs(model, "router_logits")]
    assert names == [f"model.layers.{i}.mlp.gate" for i in range(model.config.num_hidden_layers)]


def test_a_training_step_in_the_frames_of_an_error_of_an_optimizer() -> None:
    assert {"closure", "training_step"} <= {*vars(Closure), *vars(lightning.pytorch.LightningModule)}


def state_of_fsdp2() -> list[str]:
    """Runs on each rank: attributes of instances, which no class shows."""
    module = nn.Linear(4, 4)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    (group,) = parameter_groups(module)
    of_group = ("fsdp_params", "post_forward_mesh_info", "offload_policy", "post_backward", "reduce_grads")
    names = ("sharded_param", "unsharded_accumulated_grad", "mesh_info", "fsdp_placement")
    lacking = [name for name in of_group if not hasattr(group, name)]
    return lacking + [name for name in names if not hasattr(group.fsdp_params[0], name)]


@pytest.mark.slow
def test_state_of_fsdp2(pool2: Pool) -> None:
    assert pool2.run(state_of_fsdp2) == [[], []]


def gathered() -> bool:
    """Runs on each rank: rows 0, 1, 4 and 5 of 8 are the first rank's, as of two matrices in one."""
    whole, mesh = torch.arange(8.0), init_device_mesh("cpu", (2,))
    cut = distribute_tensor(whole, mesh, [strided_shard(0, 2)], src_data_rank=None)
    own = [[0, 1, 4, 5], [2, 3, 6, 7]][mesh.get_local_rank()]
    return cut.to_local().tolist() == own and cut.full_tensor().equal(whole)


def test_fused_weights_can_be_gathered(pool2: Pool) -> None:
    assert pool2.run(gathered) == [True, True]


SCALARS: list[Callable[[Tensor], Tensor]] = [Tensor.norm, Tensor.mean, Tensor.amax, lambda p: p.square().sum()]


def gradients_of_scalars() -> list[float]:
    """Runs on each rank: differences from one process, where a rank's samples weigh a scalar of a parameter."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dist.get_rank()
    see_to_gradients_of_local(["dp"])
    torch.manual_seed(0)
    whole, differences = torch.randn(4, 3, requires_grad=True), []
    for scalar in SCALARS:
        parameter = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
        (scalar(parameter).full_tensor() * (1 + rank)).backward()  # type: ignore[attr-defined]
        expected = torch.autograd.grad(scalar(whole) * 1.5, whole)[0]
        differences.append(float((parameter.grad.full_tensor() - expected).abs().max()))  # type: ignore[union-attr]
    return differences


def test_gradients_of_whole_scalars_are_averaged(pool2: Pool) -> None:
    for differences in pool2.run(gradients_of_scalars):
        assert max(differences) < 1e-6


class Uneven(nn.Module):
    """Uses its second half on the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.rare, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rare(self.used(x)) if dist.get_rank() == 0 else self.used(x)


def gradient_of_rare_parts() -> list[float]:
    """Runs on each rank: the greatest differences from half of the first rank's gradient, over two micro-batches."""
    torch.manual_seed(0)
    model, x = Uneven(), torch.randn(2, 3)
    whole = copy.deepcopy(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    reduce_what_any_rank_has(model, lambda *_: None)  # type: ignore[arg-type]
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        model(x).sum().backward()
        whole.rare(whole.used(x)).sum().backward()
    assert [p.grad for p in model.unused.parameters()] == [None, None]
    found = dict(model.rare.named_parameters())
    gradients = ((found[name].grad, p.grad) for name, p in whole.rare.named_parameters())
    return [float((many.full_tensor() - one / 2).abs().max()) for many, one in gradients]


def test_gradients_that_one_rank_has(pool2: Pool) -> None:
    for found in pool2.run(gradient_of_rare_parts):
        assert max(found) < 1e-6


def test_prepended_hooks_stand_first_in_any_order() -> None:
    module, ran = nn.Linear(2, 2), []
    module.register_forward_hook(lambda *_: ran.append("second"))
    module.register_forward_hook(lambda *_: ran.append("first"), prepend=True)
    lay_hooks_in_order(module)
    for hook in dict(dict.items(module._forward_hooks)).values():
        hook()
    module(torch.ones(2))
    assert ran == ["first", "second"] * 2


# ---- what an older torch lacks ---------------------------------------------------------------------------------------


class Old:
    """Stands for a class of an older torch, without the attributes of a newer one."""


class New:
    """Stands for the state of a unit in torch 2.13."""

    _fsdp_param_groups = ()


def test_an_older_torch_shards_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2, "FSDPState", New)
    fsdp2.check_dtypes([torch.float32, torch.uint8])
    monkeypatch.setattr(fsdp2, "FSDPState", Old)
    fsdp2.check_dtypes([torch.bfloat16])
    for dtypes, names in (([torch.bfloat16, torch.float32], "bfloat16 and float32"), ([torch.uint8], "uint8")):
        with pytest.raises(RuntimeError, match=f"these are {names}; use torch 2.13 or newer"):
            fsdp2.check_dtypes(dtypes)


def test_an_older_torch_leaves_several_dtypes_on_one_data_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False), nn.Linear(2, 2))
    mesh, policy = MagicMock(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh.size.return_value = 1
    monkeypatch.setattr(fsdp2, "FSDPState", New)
    assert not needs_no_sharding(model, mesh, FSDP2Config(), policy)
    monkeypatch.setattr(fsdp2, "FSDPState", Old)
    assert needs_no_sharding(model, mesh, FSDP2Config(), policy)
    assert not needs_no_sharding(model[1], mesh, FSDP2Config(), policy)  # computes in bfloat16
    model.requires_grad_(True)  # gradients of the narrow ones would be reduced in float32
    assert not needs_no_sharding(model, mesh, FSDP2Config(), policy)


def test_an_older_torch_has_no_parts_of_an_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(name: Any) -> Any:
        if name == "ep":
            raise NotImplementedError("Currently, this only allows slicing out a contiguous flattened dim.")
        return MagicMock()

    old = MagicMock(__getitem__=MagicMock(side_effect=look_up))
    monkeypatch.setattr(meshes, "init_device_mesh", lambda *_, **__: old)
    with pytest.raises(RuntimeError, match=r"efsdp and ep: .* need torch 2.13 or newer"):
        meshes.build_mesh(meshes.resolve_sizes(4, ep=2), "cpu")


# ---- what importing does ---------------------------------------------------------------------------------------------

ALLOWED = {"StrategyRegistry.register", "_leave_out", "logger.addHandler", "logger.setLevel", "warnings.filterwarnings"}


def calls_at_import(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.For | ast.If | ast.With | ast.Try):
            yield from calls_at_import(statement.body)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield ast.unparse(statement.value.func)
        elif isinstance(statement, ast.Assign):
            yield from (ast.unparse(target) for target in statement.targets if isinstance(target, ast.Attribute))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_importing_changes_nothing_of_others(path: Path) -> None:
    body = [s for s in ast.parse(path.read_text()).body if "__main__" not in ast.unparse(s)]
    assert set(calls_at_import(body)) <= ALLOWED
