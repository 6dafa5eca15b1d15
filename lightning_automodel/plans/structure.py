"""Looks at a model through its plan: the style of each module and parameter, and what in its blocks is split."""

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from lightning_automodel.modules.matrices import is_turned
from lightning_automodel.modules.structure import CONTAINERS, nearest_config, outermost, text_config
from lightning_automodel.plans.selection import Plan
from lightning_automodel.plans.styles import STYLES, Style, style_of, turned


class Structure:
    """A model seen through its plan: the style of each module and parameter, ties resolved."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.first_names = {id(module): name for name, module in model.named_modules()}
        self.hidden_size = getattr(text_config(model), "hidden_size", None)
        self.module_styles: dict[str, Style] = {}
        self.parameter_styles: dict[str, Style] = {}
        for name in self.modules:
            if name and (rule := plan.rule_for(name)):
                self.module_styles.setdefault(self.first_name(name), self._fit(name, style_of(plan.rules[rule], rule)))
        for name, _ in model.named_parameters(remove_duplicate=False):
            rule, owner = plan.rule_for(name), self.first_name(name.rpartition(".")[0])
            if rule:
                self.parameter_styles[name] = self._fit(owner, style_of(plan.rules[rule], rule))
            elif owner in self.module_styles:
                self.parameter_styles[name] = self.module_styles[owner]
        self._share_styles_of_ties(model)
        self._split_inputs_of_whole_parents()

    def _fit(self, module: str, style: Style) -> Style:
        return turned(style) if is_turned(self.modules[module]) else style

    def restyle(self, styles: Mapping[str, Mapping[str, Style]]) -> None:
        """Give what stands in modules other styles, by their names, in the place of all that it has."""
        found = {name: self._fit(name, style) for inside in styles.values() for name, style in inside.items()}
        kept = {name: style for name, style in self.module_styles.items() if outermost(list(styles), name) is None}
        self.module_styles = kept | found
        for name in list(self.parameter_styles):
            owner = self.first_name(name.rpartition(".")[0])
            if outermost(list(styles), owner) is not None:
                self.parameter_styles.pop(name)
                self.parameter_styles |= {name: found[owner]} if owner in found else {}

    def first_name(self, name: str) -> str:
        """Return the name under which a module is registered first: it may stand in several places."""
        return self.first_names[id(self.modules[name])]

    def names_of(self, names: Iterable[str]) -> list[str]:
        """List all names of the modules with these ``names``."""
        modules = {id(self.modules[name]) for name in names}
        return [name for name, module in self.modules.items() if id(module) in modules]

    def _share_styles_of_ties(self, model: nn.Module) -> None:
        """Gives tied parameters one style if any of them has one (rule G)."""
        groups: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            groups.setdefault(parameter, []).append(name)
        for _, names in sorted(groups.items(), key=lambda group: -group[0].ndim):  # a bias follows its matrix
            styles = {
                self.parameter_styles[n].name: self.parameter_styles[n] for n in names if n in self.parameter_styles
            }
            if len(names) > 1 and styles:
                self._tie(names, list(styles.values()))

    def _tie(self, names: list[str], styles: list[Style]) -> None:
        placements = {style.placement(names[0].rpartition(".")[2], 2) for style in styles}
        if len(placements) > 1:
            raise ValueError(
                f"{' and '.join(names)} are tied, but the plan places them differently "
                f"({', '.join(style.name for style in styles)}); give them styles with the same placement"
            )
        for name in names:
            if name in self.parameter_styles:
                continue
            owner = name.rpartition(".")[0]
            if self._has_style_of_twin(name, names):
                continue
            if all(placement.is_replicate() for placement in placements):
                self.parameter_styles[name] = styles[0]  # whole in both places, which compute as on one process
                continue
            module = self.modules[owner]
            style = STYLES["embedding_rowwise" if isinstance(module, nn.Embedding) else "colwise_gather_output"]
            self.parameter_styles[name] = style
            if isinstance(module, nn.Embedding | nn.Linear):  # others hold a head's bias under one more name
                self.module_styles[owner] = style
                self.parameter_styles |= {own: style for own, _ in module.named_parameters(owner, recurse=False)}

    def _has_style_of_twin(self, name: str, names: list[str]) -> bool:
        """Copies the style of a tied module of the same class that the plan names (in an encoder tied to its
        decoder).
        """
        owner, _, short = name.rpartition(".")
        for twin in names:
            other, _, other_short = twin.rpartition(".")
            same = short == other_short and type(self.modules[owner]) is type(self.modules[other])
            if same and twin in self.parameter_styles:
                self.parameter_styles[name] = self.parameter_styles[twin]
                if other in self.module_styles:
                    self.module_styles[owner] = self.module_styles[other]
                return True
        return False

    def _split_inputs_of_whole_parents(self) -> None:
        """Split the input of a row-parallel module whose parent computes with whole matrices, where nothing else does.
        Such a plan is about another kind of layer of the same name.
        """
        for name, style in self.module_styles.items():
            parent = self.modules[name.rpartition(".")[0]]
            if style.name == "rowwise" and self._is_whole(parent, name):
                split = self._fit(name, STYLES["rowwise_split_input"])
                self.module_styles[name] = split
                self.parameter_styles |= {p: split for p, _ in self.modules[name].named_parameters(name)}

    def _is_whole(self, parent: nn.Module, name: str) -> bool:
        prefix = name.rpartition(".")[0]
        if isinstance(parent, CONTAINERS) or any(style.opens for style in self.styles_below(prefix)):
            return False
        return any(p.ndim == 2 and n not in self.parameter_styles for n, p in parent.named_parameters(prefix))

    def boundaries(self, block: str) -> Iterator[str]:
        """Yields the outermost children of a block that can work on slices alone (rule B)."""
        for child, _ in self.modules[block].named_children():
            yield from self._boundaries_below(f"{block}.{child}")

    def _boundaries_below(self, name: str) -> Iterator[str]:
        module = self.modules[name]
        styles = self.styles_below(name)
        if not styles:
            return
        works = any(style.opens for style in styles) and any(style.closes for style in styles)
        confined = works and all(style.confined for style in styles)
        if confined and not isinstance(module, CONTAINERS) and self._is_closed(name):
            yield name
            return
        for child, _ in module.named_children():
            yield from self._boundaries_below(f"{name}.{child}")

    def styles_below(self, name: str) -> list[Style]:
        """Lists the styles of a module, of the modules inside of it and of their parameters."""
        prefix = f"{name}." if name else ""
        styles = [s for n, s in self.module_styles.items() if n == name or n.startswith(prefix)]
        return styles + [s for n, s in self.parameter_styles.items() if n.startswith(prefix)]

    def _is_closed(self, name: str) -> bool:
        """Tells whether no whole parameter below writes the residual width: every contribution may be a partial sum.

        Towers that are models of their own have their own width.
        """
        widths = {self.hidden_size, getattr(nearest_config(self.modules[""], name), "hidden_size", None)}
        for parameter_name, parameter in self.modules[name].named_parameters():
            if f"{name}.{parameter_name}" in self.parameter_styles or parameter.ndim == 0:
                continue
            width = parameter.shape[-2] if parameter.ndim >= 2 else parameter.shape[-1]
            if width in widths:
                return False
        return True
