"""What expert parallelism refuses, in one sentence with the way out, before anything is trained."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.mesh import resolve_sizes
from lightning_automodel.parallel.experts.check import check_experts
from lightning_automodel.plans.experts import Owners, find_experts
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.families import tiny_model
from tests.support.training import Recorder, batches, make_trainer


def test_sizes() -> None:
    with pytest.raises(ValueError, match=r"ep=3 does not divide dp_shard=4 x cp=1 = 4.*use one of 1, 2, 4"):
        resolve_sizes(4, ep=3)
    with pytest.raises(ValueError, match="ep=0 is not a size"):
        FSDP2TPStrategy(ep=0)
    with pytest.raises(ValueError, match=r"ep=4 does not divide dp_shard=2 x cp=1 = 2"):
        FSDP2TPStrategy(dp_shard=2, ep=4)
    with pytest.raises(ValueError, match=r"DDPStrategy\(ep=2\)"):
        DDPStrategy(ep=2)
    assert FSDP2TPStrategy(ep=8)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("longcat_flash", r"not of one number of experts \(gate_up_proj: 6, down_proj: 4\).*use ep=1"),
        ("diffusion_gemma", r"model.encoder.* and model.decoder.layers.*.experts share their experts"),
        ("ernie4_5_vl_moe", r"text_moe.experts and .*vision_moe.experts are experts of one block"),
        ("jetmoe", r"num_local_experts=4.*no module that holds its experts stacked.*use ep=1"),
    ],
)
def test_modules_without_the_seam(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_experts(tiny_model(family), 4, 2)


def test_experts_in_towers_stay_as_they_are() -> None:
    found = find_experts(tiny_model("dots3_note"), 4, 2)
    assert list(found) == ["model.language_model.layers.1.mlp.experts"]


def test_numbers_that_do_not_divide() -> None:
    model = tiny_model("qwen3_moe", num_experts=60)
    with pytest.raises(ValueError, match=r"has 60 experts.* = 8 does not divide.*dp_shard x cp = 4 and dp_replicate=2"):
        find_experts(model, 8, 8)


def test_a_plan_that_names_other_experts() -> None:
    model = tiny_model("qwen3_moe")
    model.ep_plan = {"model.layers.*.mlp.experts.gate_up_proj": "grouped_gemm"}
    with pytest.raises(ValueError, match=r"experts\.down_proj of Qwen3MoeForCausalLM looks like stacked experts"):
        find_experts(model, 2, 2)


class WeightsInside(nn.Module):
    """Weights the hidden states before an activation: no sum of what experts return."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up_proj = nn.Parameter(torch.randn(4, 6, 3))
        self.down_proj = nn.Parameter(torch.randn(4, 3, 6))

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        weighted = hidden.unsqueeze(1) * top_k_weights.unsqueeze(-1)
        inner = torch.einsum("tkh,tkih->tki", weighted, self.up_proj[top_k_index]).tanh()
        return torch.einsum("tki,tkhi->th", inner, self.down_proj[top_k_index])


def test_weights_that_are_not_applied_last() -> None:
    holder = nn.ModuleDict({"experts": WeightsInside()})
    found = find_experts(holder, 2, 2)
    with pytest.raises(ValueError, match="not the sum of what its experts return of each row alone, times"):
        check_experts(holder, found.values(), "use ep=1")


def test_numbers_of_experts_that_are_no_parameter() -> None:
    holder = nn.ModuleDict({"experts": WeightsInside()})
    holder["experts"].register_buffer("scale", torch.ones(4), persistent=False)
    with pytest.raises(ValueError, match="holds the buffer scale of 4 rows, one of each expert"):
        find_experts(holder, 2, 2)


@pytest.mark.parametrize(("number", "ep", "efsdp"), [(12, 2, 2), (8, 4, 1), (8, 1, 4), (16, 2, 4)])
def test_every_expert_has_one_owner_that_gathers_it(number: int, ep: int, efsdp: int) -> None:
    owners = Owners(number, ep, efsdp)
    chunks = torch.arange(number).chunk(ep * efsdp)
    for rank in range(ep):
        gathered = torch.cat([chunks[i * ep + rank] for i in range(efsdp)])
        assert torch.equal(owners.of_rank(rank), gathered)
        assert torch.equal(owners.places()[gathered], rank * owners.local + torch.arange(owners.local))


def dense() -> None:
    make_trainer({"ep": 2}, max_steps=1).fit(Recorder(), batches(2))


def test_a_dense_model(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=r"ep=2 is for mixtures of experts.*LlamaForCausalLM"):
        pool2.run(dense, trainer=True)


def test_sizes_that_the_run_does_not_have() -> None:
    with pytest.raises(ValueError, match="ep=2 does not divide dp_shard=1"):
        L.Trainer(accelerator="cpu", devices=1, strategy=FSDP2TPStrategy(ep=2), logger=False)
