"""Tables of torch's modules are read as torch's public methods read them."""

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from lightning_automodel._compat.torch.modules import parameters_of


def test_parameters_are_those_of_torch_in_its_order() -> None:
    shared = nn.Linear(2, 2)
    several = nn.Sequential(shared, nn.Linear(3, 3), shared, nn.Sequential(nn.Linear(4, 4), shared))
    several.late, several.empty = nn.Parameter(torch.zeros(1)), nn.Parameter(several[1].weight.detach())
    several[3][0].tied = shared.weight
    several.register_module("none", None)
    several.register_parameter("nothing", None)
    tied = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_ff=8, d_kv=4, num_heads=2, num_layers=2))
    for module in (shared, several, tied, nn.Identity()):
        assert [id(p) for p in parameters_of(module)] == [id(p) for p in module.parameters()]
