"""Asks the oracle about families, on every rank: what the test and the benchmark run."""

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from lightning_automodel.mesh import TP, axis, build_mesh, resolve_sizes
from lightning_automodel.plans import derive_layout, select_plan
from tests.support.families import tiny_model
from tests.support.images import Inputs
from tests.support.oracle import examine
from tests.support.run_family import probe


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Where the layout of a family and the oracle disagree.

    Attributes:
        parameters: whole ones that the forward pass used.
        mismatches: whole parameters whose gradient the layout places differently, and how.
        problems: collectives that lack or are too many, and where.
    """

    parameters: int
    mismatches: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Nothing was found."""
        return not self.mismatches and not self.problems


def verdicts(families: list[str]) -> dict[str, Verdict]:
    """Runs on each rank, with tp over all of them."""
    return {family: verdict(family, probe(family).inputs) for family in families}


def verdict(family: str, inputs: Inputs) -> Verdict:
    """Runs on each rank, with tp over all of them."""
    tp = dist.get_world_size()
    mesh = build_mesh(resolve_sizes(tp, tp=tp), "cpu")
    model = tiny_model(family).train()
    # As if nobody had measured it: the forward pass raises where a boundary is no sum over the ranks.
    layout = derive_layout(model, replace(select_plan(model), measured=False), tp)
    layout.holders.clear()  # a trial runs modules once more, whose copies would be none that this pass needs
    torch.manual_seed(0)  # some routers sample while they train
    batch = inputs.draw(torch.Generator().manual_seed(0), with_images=True)
    findings = examine(model, axis(mesh, TP), layout, batch)
    return Verdict(
        parameters=len(findings.partial | findings.whole),
        mismatches=findings.mismatches(layout),
        problems=sorted(findings.problems),
    )
