"""Derives which parts of a block let tokens meet, and what context parallelism does about each. Pure functions.

::

    a child of a block        takes the stream alone, no convolution, no attention below it   TOKENWISE  as it is
                              attention of transformers' registry, and nothing else           ATTENTION  on its own rows
                              anything else (recurrent, convolutions, indexers, unknown)      GATHERED   whole sequence

What is not proven to work on rows sees the whole sequence, which is exact, and costs memory and time.
"""

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lightning_automodel.modules.forward import code_of
from lightning_automodel.modules.structure import CONTAINERS, class_names, find_blocks, find_towers, outermost
from lightning_automodel.plans.additions import ATTENDS_WITHIN_TOKENS, MIXES_TOKENS, WHOLE_STREAM
from lightning_automodel.plans.known_code import functions_of_users, is_measured, is_of_libraries
from lightning_automodel.plans.sequence import STREAM_ARGUMENTS, computes_between_blocks, runs_others_between
from lightning_automodel.plans.tokenwise import keeps_tokens_apart, takes_no_tokens_apart

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
ROWS_OF_ATTENTION = ("position_embeddings", "position_ids", "cache_position", "attention_mask")
"""Arguments of an attention module that hold a row for each query."""
_STATES = {"past_key_values", "layer_past", "use_cache", "output_attentions", "shared_kv_states"}
_CACHE = "cache"
"""What transformers calls the keys and values of earlier calls from 5.24 on; in code of users it may be anything."""
_POSITIONS = {"position_embeddings", "position_ids"}
_BESIDE = {"residual", "input_tensor", *STREAM_ARGUMENTS}
_ARGUMENTS_OF_BLOCKS = {*STREAM_ARGUMENTS, *ROWS_OF_ATTENTION, "input_ids", "token_type_ids"}
_MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)
_SHAPES = {"view", "reshape"}
_PASSING = {
    *("last_hidden_state", "hidden_states", "attentions", "past_key_values", "cache", "router_logits", "rope_deltas"),
    *("image_hidden_states", "audio_hidden_states", "image_outputs", "video_outputs", "audio_outputs"),
    *("shared_kv_states", "to_tuple", "get", "config", "get_text_config"),
    *("text_config", "loss_function", "vocab_size", "slice_logits_to_keep", "isinstance", "int", "slice"),
    *("final_logit_softcapping", "logits_scaling", "logit_scale", "logit_softcap", "logits_mup_width_multiplier"),
    *("unpadded_vocab_size", "torch", "tanh", "float", "math", "sqrt", "to", "device", "dtype", "weight", "shape"),
    *("num_experts", "num_experts_per_tok", "num_local_experts", "router_aux_loss_coef", "load_balancing_loss_func"),
    "warnings",
}
"""What a model may name after it has called the model inside of it, if hidden states of single rows are to go to the
head: it hands on, scales and compares; it looks at no position."""


class Treatment(Enum):
    """What context parallelism does with the input of a module."""

    TOKENWISE = "tokenwise"
    ATTENTION = "attention"
    GATHERED = "gathered"


@dataclass
class BlockList:
    """One list of blocks that runs on rows.

    Attributes:
        blocks: names, in order.
        gathered_after: names of the blocks behind which the model computes with the whole stream.
        holder: name of the model whose forward pass runs the blocks.
    """

    blocks: list[str]
    gathered_after: set[str]
    holder: str


@dataclass
class ContextLayout:
    """Context parallelism of a model.

    Attributes:
        lists: of blocks.
        gathered_blocks: names of the blocks that see the whole sequence themselves.
        children: by name, what a child of the other blocks needs; token-wise ones are not among them.
        holders: names of the models whose forward pass runs blocks.
        models: names of all models around blocks, the outermost first, and whether rows may leave what it calls.
    """

    lists: list[BlockList] = field(default_factory=list)
    gathered_blocks: set[str] = field(default_factory=set)
    children: dict[str, Treatment] = field(default_factory=dict)
    models: dict[str, bool] = field(default_factory=dict)

    def attention_of(self, block: str) -> list[str]:
        """List the names of the attention modules of a block that work on rows."""
        names = (name for name, treatment in self.children.items() if treatment is Treatment.ATTENTION)
        return [name for name in names if name.startswith(f"{block}.")]

    @property
    def holders(self) -> list[str]:
        """List the names of the models whose forward pass runs blocks."""
        return list(dict.fromkeys(entry.holder for entry in self.lists))

    @property
    def gathered(self) -> list[str]:
        """List the names of all modules that see the whole sequence."""
        gathered = (name for name, treatment in self.children.items() if treatment is Treatment.GATHERED)
        return [*self.gathered_blocks, *gathered]


def derive_context_layout(model: nn.Module) -> ContextLayout:
    """Find the blocks of ``model`` that can run on rows, and what each child needs.

    Towers (vision, audio) are left whole, and so are encoders with decoders: what the one gives is not a row of the
    other.
    """
    layout = ContextLayout()
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or getattr(config, "is_encoder_decoder", False):
        return layout
    towers = list(find_towers(model))
    lists: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, block in find_blocks(model).items():
        if outermost(towers, name) is None and not names_of(block) & {REGISTRY}:
            lists.setdefault(name.rpartition(".")[0], []).append((name, block))
    whole = _holders_that_stay_whole(model, list(lists))
    for list_name, members in lists.items():
        if _model_around(model, list_name.rpartition(".")[0]) in whole:
            continue
        _add_list(layout, model, list_name, dict(members))
    for name in layout.holders:
        _add_models(layout, model, name)
    return layout


def _holders_that_stay_whole(model: nn.Module, lists: list[str]) -> set[str]:
    """Find models that run several lists in turns, and so compute with the stream between blocks, or are known to.

    And those that run blocks behind a model inside of them that does (ViTMAE's decoder): that is another sequence.
    """
    parents = [list_name.rpartition(".")[0] for list_name in lists]
    holders = {parent: _model_around(model, parent) for parent in parents}
    known = {name for name in holders.values() if WHOLE_STREAM & set(class_names(model.get_submodule(name)))}
    found = set(holders.values())
    nested = {outer for outer in found for inner in found - {outer} if outermost([outer], inner) or not outer}
    return known | nested | {holders[parent] for parent in parents if parents.count(parent) > 1}


def _add_list(layout: ContextLayout, model: nn.Module, list_name: str, blocks: dict[str, nn.Module]) -> None:
    parent = list_name.rpartition(".")[0]
    holder = _model_around(model, parent)
    names = list(blocks)
    above = model.get_submodule(parent)
    after = set(names) if computes_between_blocks(above) or runs_others_between(model, list_name, names) else set()
    if names_of(above) & _SHAPES or parent != holder or not _keeps_rows_behind(above, blocks):
        after.add(names[-1])
    layout.lists.append(BlockList(names, after, holder))
    for name, block in blocks.items():
        unknown = set(ordered_arguments(block)[1:]) - _ARGUMENTS_OF_BLOCKS - _states_of(block)
        if not unknown <= handed_to_children(block) or not keeps_tokens_apart(block) or _takes_any(block):
            layout.gathered_blocks.add(name)
            continue
        layout.children |= _treatments_of_children(block, name)


def _keeps_rows_behind(holder: nn.Module, blocks: dict[str, nn.Module]) -> bool:
    """Tell whether ``holder`` treats every token alone behind its blocks: known code, and no modules of a user's.

    Models inside of it (of images) run before.
    """
    models = (module for module in holder.modules() if isinstance(module, PreTrainedModel) and module is not holder)
    within = {id(module) for part in (*blocks.values(), *models) for module in part.modules()}
    others = (module for module in holder.modules() if id(module) not in within)
    return is_measured(holder) and all(map(keeps_tokens_apart, others))


def _treatments_of_children(block: nn.Module, name: str) -> dict[str, Treatment]:
    """Choose the treatment of children; attention is gathered beside a gathered child that takes masks."""
    children = dict(_children(block, name))
    found = {child_name: treatment_of(child) for child_name, child in children.items()}
    treatments = {child_name: found[child_name] for child_name in found if found[child_name] is not Treatment.TOKENWISE}
    gathered = [children[child_name] for child_name, treatment in treatments.items() if treatment is Treatment.GATHERED]
    if any(set(ordered_arguments(child)) & set(ROWS_OF_ATTENTION) for child in gathered):
        return {child_name: Treatment.GATHERED for child_name in treatments}
    return treatments


def _add_models(layout: ContextLayout, model: nn.Module, holder: str) -> None:
    """Add the models around a holder, and whether each only hands the hidden states on to the head."""
    parts = holder.split(".") if holder else []
    around = [".".join(parts[:i]) for i in range(len(parts))]
    models = [n for n in around if isinstance(model.get_submodule(n), PreTrainedModel)]
    for outer, inner in pairwise([*models, holder]):
        attribute = (inner[len(outer) :].lstrip(".")).split(".")[0]
        layout.models[outer] = layout.models.get(outer, True) and hands_on(model.get_submodule(outer), attribute)
    layout.models.setdefault(holder, True)


def hands_on(model: nn.Module, inner: str) -> bool:
    """Tells whether all that the forward pass of ``model`` names after its attribute ``inner`` treats rows alone."""
    names: list[str] = []
    found, is_known = False, is_measured(model)
    if not takes_no_tokens_apart(model, inner):
        return False
    for instruction in dis.get_instructions(code_of(model)):
        name = instruction.argval
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"):
            if name != inner:
                names.append(name)
            elif is_known or not found:
                names, found = [], True
    if not is_known and "shape" in names:
        return False
    head = {name for name, child in model.named_children() if child is head_of(model) and _is_apart(child)}
    return found and all(n in _PASSING or n in head or n.endswith(("Output", "WithPast")) for n in names)


def _takes_any(block: nn.Module) -> bool:
    """Tell whether ``block`` takes arguments without a name."""
    parameters = inspect.signature(type(block).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)


def _is_apart(module: nn.Module) -> bool:
    return all(map(keeps_tokens_apart, module.modules()))


def handed_to_children(block: nn.Module) -> set[str]:
    """Find the arguments that the forward pass of ``block`` does nothing with but call its children with them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code_of(block))))
    except (OSError, TypeError, SyntaxError):
        return set()
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    handed: list[str] = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id == "self":
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            handed += [value.id for value in values if isinstance(value, ast.Name)]
    return {name for name in ordered_arguments(block) if names.count(name) == handed.count(name)}


def head_of(model: nn.Module) -> Any:
    """Return what makes logits of the hidden states of ``model``, if it has that."""
    return model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None


def _model_around(model: nn.Module, name: str) -> str:
    while not isinstance(model.get_submodule(name), PreTrainedModel):
        name = name.rpartition(".")[0]
    return name


def _children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}"
        if isinstance(child, CONTAINERS):
            yield from _children(child, full)
        else:
            yield full, child


# ---- treatments of children -----------------------------------------------------------------------------------------


def treatment_of(child: nn.Module) -> Treatment:
    """Choose the treatment of a child of a block."""
    if not _meets_tokens(child):
        return Treatment.TOKENWISE
    names = class_names(child)
    inner = any(_meets_tokens(module) for name, module in child.named_modules() if name)
    if REGISTRY not in names_of(child) or inner or any(name in MIXES_TOKENS for name in names):
        return Treatment.GATHERED
    if not is_of_libraries(child) or functions_of_users(child):  # which may look at other tokens
        return Treatment.GATHERED
    arguments = set(ordered_arguments(child)[1:])
    known = arguments <= {*ROWS_OF_ATTENTION, *_states_of(child)}
    placed = bool(arguments & _POSITIONS) or "arange" not in names_of(child)
    return Treatment.ATTENTION if known and placed else Treatment.GATHERED


def _states_of(module: nn.Module) -> set[str]:
    """List the arguments of a module that hold no row for each token."""
    return _STATES | {_CACHE} if is_measured(module) else _STATES


def _meets_tokens(module: nn.Module) -> bool:
    """Tell whether tokens may meet in ``module``: not where it takes the stream alone and holds nothing that mixes."""
    if set(ordered_arguments(module)[1:]) - _BESIDE:
        return True
    return any(
        isinstance(inner, _MIXING) or _attends_to_tokens(inner) or not keeps_tokens_apart(inner)
        for inner in module.modules()
    )


def _attends_to_tokens(module: nn.Module) -> bool:
    return REGISTRY in names_of(module) and ATTENDS_WITHIN_TOKENS.isdisjoint(class_names(module))


def names_of(module: nn.Module) -> set[str]:
    """List the names that the code of the module's forward uses."""
    code = getattr(code_of(module), "__code__", None)
    return set(code.co_names) if code else set()


def ordered_arguments(module: nn.Module) -> list[str]:
    """List the arguments of a module's forward, without ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(type(module).forward).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, p in parameters.items() if p.kind not in variadic][1:]
