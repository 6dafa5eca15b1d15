"""A device that is not there: the same step on a fake CUDA device finds what lies on the wrong one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.library import custom_op

from lightning_automodel.planner.play import play, stage
from tests.planner.subjects import LAYOUTS, Layout, model_on_meta, run_of

EIGHT = Layout(8, {"tp": 2, "cp": 2}, {"sequence_parallel": True, "activation_checkpointing": True})


@pytest.mark.long
def test_eight_ranks_of_a_device_that_is_not_there() -> None:
    run = replace(run_of(EIGHT), device_type="cuda")
    with stage(run) as mesh:
        watched = play(model_on_meta(), run, mesh)
    on_cpu = run_of(EIGHT)
    with stage(on_cpu) as mesh:
        expected = play(model_on_meta(), on_cpu, mesh)
    # On the CPU attention over cp has a backward pass of its own, which gathers keys once more.
    assert {k: n for k, n in watched.volume.items() if k.axis != "cp"} == {
        k: n for k, n in expected.volume.items() if k.axis != "cp"
    }
    assert watched.peaks["clipping"]["parameters"] == expected.peaks["clipping"]["parameters"]


class OnTheHost(nn.Module):
    """Adds a table that was forgotten on the host."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.ones(hidden.shape[-1])


def test_a_tensor_on_the_wrong_device_is_found() -> None:
    model, run = model_on_meta(), replace(run_of(LAYOUTS["dp2"]), device_type="cuda")
    model.model.norm = OnTheHost()
    with stage(run) as mesh, pytest.raises(RuntimeError, match=r"cuda:0(,| and) cpu"):
        play(model, run, mesh)


@custom_op("lightning_automodel_tests::rounded", mutates_args=())
def rounded(x: Tensor) -> Tensor:
    """Of what torch composes of others there is RMSNorm's, in builds for CUDA only."""
    return x.bfloat16().type_as(x)


@rounded.register_fake
def _(x: Tensor) -> Tensor:
    return x.bfloat16().type_as(x)


rounded.register_autograd(lambda ctx, gradient: gradient)


class Rounded(nn.Module):
    """Gives what a composed operation returns to others."""

    def forward(self, hidden: Tensor) -> Tensor:
        return rounded(hidden.float())


def test_what_torch_composes_of_others_stays_on_the_device() -> None:
    model, run = model_on_meta(), replace(run_of(LAYOUTS["dp2"]), device_type="cuda")
    model.model.norm = Rounded()
    with stage(run) as mesh:
        assert play(model, run, mesh).flops["backward"] > 0
