"""Other tensors in the place of parameters, while a module runs."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.modules.forward import recomputation_context
from lightning_automodel.modules.parameter_swap import ParameterSwap


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        if fail:
            raise RuntimeError
        return self.second(self.first(x))


class Doubled:
    """Counts how often it computes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, parameter: Tensor) -> Tensor:
        self.calls += 1
        return parameter * 2


def swapped() -> tuple[Tied, Doubled]:
    model, doubled, swap = Tied(), Doubled(), ParameterSwap()
    swap.add(model.first, "weight", doubled)
    swap.add(model.second, "weight", doubled)
    swap.install(model)
    return model, doubled


def test_tied_parameters_are_computed_once_and_get_both_gradients() -> None:
    model, doubled = swapped()
    weight, x = model.first.weight, torch.ones(1, 3)
    output = model(x)
    output.sum().backward()
    assert doubled.calls == 1
    again = weight.detach().clone().requires_grad_()
    expected = x @ (2 * again).T @ (2 * again).T
    expected.sum().backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weight.grad, again.grad)


def test_parameters_are_back_whatever_happens() -> None:
    model, _ = swapped()
    weight = model.first.weight
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3), fail=True)
    assert model.first.weight is weight
    model(torch.ones(1, 3))
    assert model.second.weight is weight
    assert model.state_dict().keys() == Tied().state_dict().keys()


def test_a_recomputation_sees_what_the_forward_pass_saw() -> None:
    model, _ = swapped()
    context = recomputation_context(model)
    with context():
        torch.testing.assert_close(model.second.weight, model.first.weight)
        assert not isinstance(model.first.weight, nn.Parameter)
    assert isinstance(model.first.weight, nn.Parameter)


def test_a_copy_exchanges_its_own() -> None:
    model, _ = swapped()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.weight.zero_()
    assert other(torch.ones(1, 3)).count_nonzero() == 0
    assert model(torch.ones(1, 3)).count_nonzero() == 3


class Adapted(nn.Module):
    """Adapts the weight of a layer as peft does: takes it out for a pass, and leaves it as a buffer."""

    parameter_name = "weight"

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        weight = self.base_layer._parameters.pop("weight")
        self.base_layer.register_buffer("weight", weight)  # an error if there is one still
        if fail:
            raise RuntimeError
        return self.base_layer(x)


def test_what_an_adapter_leaves_as_a_buffer_goes_back() -> None:
    adapted, swap = Adapted(nn.Linear(3, 3)), ParameterSwap()
    block = nn.Sequential(adapted)
    swap.add(adapted.base_layer, "weight", Doubled())
    swap.install(block)
    with pytest.raises(RuntimeError):
        adapted(torch.ones(3), fail=True)
    for _ in range(2):
        block(torch.ones(3))
        assert not dict(adapted.base_layer.named_buffers())
        assert isinstance(adapted.base_layer.weight, nn.Parameter)


def test_hooks_that_were_there_before_see_the_other_tensor() -> None:
    layer, swap, seen = nn.Linear(3, 3), ParameterSwap(), []
    layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight))  # as old weight_norm reads it
    swap.add(layer, "weight", Doubled())
    swap.install(layer)
    layer(torch.ones(1, 3))
    torch.testing.assert_close(seen[0], 2 * layer.weight)
