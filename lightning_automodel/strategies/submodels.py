"""Finds what a LightningModule holds that must be made parallel: Hugging Face models, and layers beside them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_automodel._compat.dtensor.tensors import root_mesh
from lightning_automodel._compat.torch.compilation import OptimizedModule, unwrap_compiled
from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.config import LEVERS_OF_BLOCKS, SWITCHES_OF_LOSS, StageSwitches
from lightning_automodel.config.switches import changed_fields
from lightning_automodel.distributed.kept_groups import check_groups
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.loading.quantized import refuse_quantized
from lightning_automodel.modules.structure import CONTAINERS, find_blocks, find_towers, outermost
from lightning_automodel.strategies.own_parameters.places import Place


@dataclass(frozen=True)
class Submodel:
    """A module that is called as a whole, and is sharded as one FSDP2 root."""

    name: str
    module: nn.Module

    @property
    def mesh(self) -> DeviceMesh | None:
        """Return the mesh on which it is parallel, if it has parameters that say so."""
        return next((p.device_mesh for p in self.module.parameters() if isinstance(p, DTensor)), None)

    @property
    def is_sharded(self) -> bool:
        """Tell whether it was made parallel: by ``from_pretrained``, or by an earlier call of the trainer."""
        return isinstance(self.module, FSDPModule)


def find_submodels(root: nn.Module, bare: bool = False) -> list[Submodel]:
    """Finds the submodels below a LightningModule, in the order of registration.

    Args:
        root: the LightningModule.
        bare: allow parameters that several submodels hold: nothing is sharded.

    Returns:
        each once: a second name of a part (``self.head = self.model.lm_head``) is no submodel.

    Raises:
        ValueError: for a parameter of several; for quantized weights, those without a shape (``LazyLinear``) and those
            of TorchScript.
    """
    found = [part for part in _parts(root, "", bare) if isinstance(part, Submodel)]
    parts = {id(part) for submodel in found for part in submodel.module.modules() if part is not submodel.module}
    submodels = list({id(s.module): s for s in reversed(found) if id(s.module) not in parts}.values())[::-1]
    for submodel in submodels:
        refuse_quantized(submodel.module)
        _refuse_lazy(submodel)
    if not bare:
        _refuse_scripted(submodels)
        _refuse_shared(submodels)
    return submodels


def find_own_parameters(root: nn.Module, submodels: Sequence[Submodel]) -> list[Place]:
    """Finds the parameters below a LightningModule that no submodel holds.

    Raises:
        ValueError: for a second name of a parameter that a submodel holds.
    """
    places = [part for part in _parts(root, "") if isinstance(part, Place)]
    names: dict[Tensor, str] = {p: f"{s.name}.{name}" for s in submodels for name, p in s.module.named_parameters()}
    for place in places:
        if (parameter := place.parameter) is not None and parameter in names:
            raise ValueError(
                f"{place.path} is {names[parameter]}, of which it would be a copy that does not train, since "
                "that one is sharded where its layer is; take it from there where it is used"
            )
    return places


def names_of_own_parameters(root: nn.Module | None) -> list[str]:
    """List how code of ``root`` reads the parameters that no submodel holds: ``temperature``, ``weights[0]``."""
    places = (part for part in _parts(root, "") if isinstance(part, Place)) if root is not None else ()
    return [re.sub(r"\.(\d+)", r"[\1]", place.path) for place in places]


def refuse_own_parameters(root: nn.Module) -> None:
    """Refuse parameters below a LightningModule that no submodel holds, for Megatron-FSDP, which cuts all it knows.

    Raises:
        ValueError: naming one.
    """
    place = next((part for part in _parts(root, "") if isinstance(part, Place)), None)
    if place is not None:
        raise ValueError(
            f"the parameter {place.path} belongs to no layer whose forward is called, so Megatron-FSDP cannot shard "
            "it; move it into an nn.Module whose forward uses it and that holds no model of transformers, or use "
            "FSDP2TPStrategy or DDPStrategy, under which each rank holds it whole"
        )


def _refuse_lazy(submodel: Submodel) -> None:
    for name, parameter in submodel.module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"{submodel.name}.{name} ({type(submodel.module).__name__}) has no shape before a first forward pass, "
                "so no rank knows its part of it; name its sizes, or call its layer with a sample in configure_model"
            )


def _refuse_scripted(submodels: Sequence[Submodel]) -> None:
    for submodel in submodels:
        for name, module in submodel.module.named_modules(prefix=submodel.name):
            if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
                raise ValueError(
                    f"{name} is a module of TorchScript (torch.jit), whose parameters cannot be sharded; use the "
                    "nn.Module that it was made of, or DDPStrategy. Each rank holds one whole that is an attribute of "
                    "the LightningModule itself and is frozen (parameter.requires_grad_(False) for each)"
                )


def _refuse_shared(submodels: Sequence[Submodel]) -> None:
    """Refuse parameters that two submodels hold: each would shard its own copy and sum its own gradient."""
    owners: dict[int, tuple[Submodel, str]] = {}
    for submodel in submodels:
        for name, parameter in submodel.module.named_parameters():
            other, first = owners.setdefault(id(parameter), (submodel, name))
            if other is not submodel:
                raise ValueError(
                    f"{submodel.name}.{name} is {other.name}.{first}: two models that are sharded each for itself "
                    "cannot share a parameter, since either would train a copy; use DDPStrategy, a parameter "
                    "of its own for each, or one nn.Module of layers of yours that holds both and is called as a whole"
                )


def unwrap_compiled_children(root: nn.Module) -> None:
    """Replaces children that ``torch.compile`` wrapped by what they wrap: the wrapper hides the model and its names."""
    for parent in list(root.modules()):
        for name, child in parent.named_children():
            if isinstance(child, OptimizedModule):
                warn_once(
                    f"{name} was passed through torch.compile before it was made parallel; it runs uncompiled, "
                    "because a compiled graph of the whole model cannot be made parallel block by block"
                )
                setattr(parent, name, unwrap_compiled(child))


def check_complete(submodel: Submodel, tower_policy: str) -> None:
    """Checks that nothing was added to a submodel after it was made parallel, which no rank would gather or reduce.

    Args:
        submodel: made parallel before.
        tower_policy: of its config; "replicate" leaves the parameters of towers as they are.

    Raises:
        ValueError: naming a parameter, and where to build instead.
    """
    if added := _added(submodel, tower_policy):
        raise ValueError(
            f"{submodel.name}.{added[0]}{_others(added)}: added to a model that was made parallel already (by "
            "from_pretrained in configure_model, for example), so no rank would shard it or reduce its gradient; build "
            "and change the model in __init__ of the LightningModule, where it is still whole"
        )


def check_mesh(name: str, mesh: DeviceMesh | None, own: DeviceMesh) -> None:
    """Checks that what is parallel on ``mesh`` is so on the mesh ``own`` of the trainer, whose groups are there.

    Raises:
        ValueError: naming it by ``name``, if it is on another one.
    """
    if mesh is None:
        return
    check_groups(root_mesh(mesh), name)
    if root_mesh(mesh) != own:
        raise ValueError(
            f"{name} was made parallel on another mesh ({mesh}) than this trainer's ({own}); build a new "
            "LightningModule, or use the trainer that made it parallel"
        )


def refuse_additions(root: nn.Module, tower_policy: str, trainable_only: bool) -> None:
    """Refuse what hooks have added to models that are parallel, before a run computes with it.

    ::

                              GPU 0           GPU 1
        q_proj [16, 24]       rows 0-7        rows 8-15       as it was split
        lora_B of an adapter  16 or 8 rows    16 or 8 rows    whole, or as large as a slice and of no rows of its own

    Args:
        root: the LightningModule.
        tower_policy: of its config; "replicate" leaves the parameters of towers as they are.
        trainable_only: pass what is frozen, which FSDP2 leaves whole on each rank, as one process has it.

    Raises:
        ValueError: naming a parameter, and the hook that it belongs into.
    """
    for submodel in (part for part in _parts(root, "") if isinstance(part, Submodel) and part.is_sharded):
        added = _added(submodel, tower_policy, trainable_only)
        if added:
            raise ValueError(
                f"{submodel.name}.{added[0]}{_others(added)}: added to a model that is parallel already (an adapter, "
                "by get_peft_model, add_adapter or load_adapter, say), so no rank would compute with its part or "
                "reduce its gradient; add it in configure_model, behind from_pretrained"
            )


def _added(submodel: Submodel, tower_policy: str, trainable_only: bool = False) -> list[str]:
    towers = list(find_towers(submodel.module)) if tower_policy == "replicate" else []
    plain = [
        name
        for name, p in submodel.module.named_parameters()
        if not isinstance(p, DTensor) and (p.requires_grad or not trainable_only)
    ]
    return [name for name in plain if outermost(towers, name) is None]


def _others(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def refuse_single_tokens(root: nn.Module) -> None:
    """Refuse rows of embeddings that train alone, which peft reads outside of where Megatron-FSDP gathers them.

    Args:
        root: the LightningModule.

    Raises:
        ValueError: naming the embedding.
    """
    for name, module in root.named_modules():
        if "token_adapter" in dict(module.named_children()):
            raise ValueError(
                f"trainable_token_indices of peft ({name}): what trains would be read while Megatron-FSDP has it in "
                "shards; use FSDP2TPStrategy with tp=1, DDPStrategy, or modules_to_save=['embed_tokens']"
            )


def no_plan(owner: str, tp: int, submodels: Sequence[Submodel]) -> str:
    """Says why ``tp`` splits none of the submodels of a LightningModule."""
    held = ", ".join(f"{submodel.name} ({type(submodel.module).__name__})" for submodel in submodels[:5])
    return (
        f"tp={tp}, but nothing that {owner} holds has a tensor-parallel plan ({held}); use tp=1, or give rules: "
        "FSDP2Config(tp_plan={...}) or register_tp_plan, with names inside of the module that is called as a whole, "
        "such as 'blocks.*.ffn.up' and not 'model.blocks.*.ffn.up'"
    )


def no_experts(owner: str, ep: int, submodels: Sequence[Submodel]) -> str:
    """Says why ``ep`` finds nothing in a LightningModule to which tokens could travel."""
    held = ", ".join(f"{submodel.name} ({type(submodel.module).__name__})" for submodel in submodels[:5])
    return f"ep={ep} is for mixtures of experts, and nothing that {owner} holds is one ({held}); use ep=1"


def check_switches_find_work(config: StageSwitches, modules: Sequence[nn.Module]) -> None:
    """Refuse switches that would do nothing: layers beside a model are passed over, but a model must be there.

    Raises:
        ValueError: naming the fields.
    """
    changed = changed_fields(config, LEVERS_OF_BLOCKS)
    if changed and not any(_has_blocks(module) for module in modules):
        raise ValueError(f"{', '.join(changed)}: the LightningModule holds no repeated blocks, on which it would work")
    changed = changed_fields(config, SWITCHES_OF_LOSS)
    if changed and not any(isinstance(m, PreTrainedModel) for module in modules for m in module.modules()):
        raise ValueError(f"{', '.join(changed)}: the LightningModule holds no model of transformers, whose loss it is")


def _has_blocks(module: nn.Module) -> bool:
    """Tells whether a submodel has blocks; a model of transformers says by itself what it lacks."""
    return isinstance(module, PreTrainedModel) or bool(find_blocks(module))


def _parts(module: nn.Module, name: str, bare: bool = False) -> Iterator[Submodel | Place]:
    """Yield what is called as a whole, and parameters beside that."""
    if isinstance(module, PreTrainedModel | FSDPModule):
        yield Submodel(name, module)
        return
    if isinstance(module, torch.jit.ScriptModule) and (bare or not any(p.requires_grad for p in module.parameters())):
        return  # each rank holds it whole
    is_layer = name and not isinstance(module, CONTAINERS) and not _is_parameter_container(module)
    if is_layer and not any(isinstance(m, PreTrainedModel) for m in module.modules()):
        if next(module.parameters(), None) is not None:
            yield Submodel(name, module)
        return
    for own, parameter in own_parameters(module).items():
        if parameter is not None:
            yield Place(module, own, f"{name}.{own}" if name else own)
    for child_name, child in module.named_children():
        yield from _parts(child, f"{name}.{child_name}" if name else child_name, bare)


def _is_parameter_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ParameterList | nn.ParameterDict)
