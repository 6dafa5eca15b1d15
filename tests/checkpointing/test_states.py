"""States by name, on one process without torch.distributed."""

import copy
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from lightning_automodel.checkpointing.states import model_state, optimizer_state, restore_model, restore_optimizer


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    return model


def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def grouped(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(model[1].parameters()), "lr": 0.3}, {"params": list(model[0].parameters())}]


class Counting(SGD):
    """Counts steps for all parameters together, and in an option that its groups get with the first step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        state: dict[Any, Any] = self.state
        state["k"] = state.get("k", torch.zeros(1, dtype=torch.long)) + 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["weight_decay"] = 0.1 * state["k"].item() * group["count"]
        return super().step(closure)


@pytest.mark.parametrize("make", [AdamW, Adafactor, Counting])
def test_an_optimizer_goes_on_where_it_was(make: Any) -> None:
    """By number in the same order, and by name in groups of another order."""
    model = build()
    optimizer = make(model.parameters(), lr=0.1)
    step(model, optimizer)
    by_number, by_name, weights = optimizer.state_dict(), optimizer_state(model, optimizer), model_state(model)
    copies = [(by_number, lambda m: m.parameters()), (by_name, lambda m: reversed(list(m.parameters())))]
    restored = []
    for saved, order in copies:
        other = build(seed=1)
        restore_model(other, {name: value.clone() for name, value in weights.items()})
        fresh = make(order(other), lr=7.0)
        restore_optimizer(other, fresh, saved)
        assert fresh.param_groups[0]["lr"] == 0.1
        restored.append((other, fresh))
    expected = step(model, optimizer)
    for other, fresh in restored:
        assert torch.equal(step(other, fresh), expected)


class OfManyDtypes(SGD):
    """Sums in float64 and in a list in bfloat16, and counts how often each element grew."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            wide = state.setdefault("wide", torch.zeros_like(p, dtype=torch.float64)).mul_(0.9).add_(p.grad)
            narrow = state.setdefault("narrow", [torch.zeros_like(p, dtype=torch.bfloat16)])[0].mul_(0.7).add_(p.grad)
            count = state.setdefault("count", torch.zeros_like(p, dtype=torch.long)).add_(p.grad > 0)
            p.add_((wide + narrow.double() + (count % 2)).to(p.dtype), alpha=-0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_keep_their_dtypes(dtype: torch.dtype) -> None:
    """Which torch casts to that of their parameter; where this one has another than it had, they are cast."""
    model = build().to(dtype)
    optimizer = OfManyDtypes(model.parameters())
    for _ in range(3):
        model(torch.ones(3, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()
    weights, saved = model_state(model), copy.deepcopy(optimizer.state_dict())
    for dtype_now in (dtype, torch.float64):
        other = build(seed=1).to(dtype_now)
        fresh = OfManyDtypes(other.parameters())
        restore_optimizer(other, fresh, saved, weights)
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            found, expected = fresh.state[p], optimizer.state[q]
            for one, many in ((found["wide"], expected["wide"]), (found["narrow"][0], expected["narrow"][0])):
                assert one.dtype == (many.dtype if dtype_now == dtype else dtype_now)
                assert torch.equal(one, many.to(one.dtype))
            assert found["count"].equal(expected["count"].to(dtype_now if dtype_now != dtype else torch.long))


def test_groups_follow_their_parameters() -> None:
    model = build()
    optimizer = SGD(grouped(model), lr=0.1, momentum=0.9)
    step(model, optimizer)
    fresh = SGD(grouped(model)[::-1], lr=1.0)
    restore_optimizer(model, fresh, optimizer_state(model, optimizer))
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.3]
    assert all("momentum_buffer" in fresh.state[p] for p in model.parameters())


def test_optimizers_that_do_not_fit() -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    step(model, optimizer)
    with pytest.raises(ValueError, match="has 4 parameters and this one has 2"):
        restore_optimizer(model, AdamW(model[0].parameters()), optimizer.state_dict())
    with pytest.raises(ValueError, match="not a parameter of Sequential"):
        optimizer_state(model, AdamW([torch.zeros(1, requires_grad=True)]))


def test_states_of_other_optimizers_are_refused() -> None:
    model = build()
    sgd, adam = SGD(model.parameters(), momentum=0.9), AdamW(model.parameters())
    step(model, sgd)
    step(model, adam)
    for optimizer, other in ((sgd, adam), (adam, sgd)):
        for saved in (optimizer.state_dict(), optimizer_state(model, optimizer)):
            with pytest.raises(ValueError, match=f"of another optimizer than {type(other).__name__}: with .*momentum"):
                restore_optimizer(model, other, saved)
    grown = SGD(grouped(model), lr=0.1, momentum=0.9)
    for group in grown.param_groups:
        group["max_lr"] = 0.2  # as some schedules do
    restore_optimizer(model, SGD(grouped(model), lr=0.1), grown.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[2, 2\] parameters and this one of \[4\]"):
        restore_optimizer(model, sgd, grown.state_dict())


def test_options_that_came_with_a_step_are_no_sign_of_another_optimizer() -> None:
    model = build()
    optimizer = Counting(model.parameters(), lr=0.1)
    step(model, optimizer)
    saved = optimizer_state(model, optimizer)
    for group in saved["param_groups"]:
        del group["differentiable"]  # classes of users have no such option, until torch adds it to a copy
    restore_optimizer(model, copy.copy(Counting(model.parameters(), lr=0.1)), saved)


class Around(SGD):
    """Hands out states in a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {"inner": state["state"], "param_groups": state["param_groups"]}


def test_states_of_another_form_are_refused() -> None:
    model = build()
    with pytest.raises(
        ValueError, match=r"Around.state_dict\(\) has 'inner', 'param_groups' and no 'state', .*self.state"
    ):
        optimizer_state(model, Around(model.parameters(), lr=0.1))


def test_states_in_a_deque_go_on() -> None:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight] = {"history": deque([torch.ones(4, 4), torch.zeros(4, 4)])}
    fresh = SGD(model.parameters(), lr=0.1)
    restore_optimizer(model, fresh, optimizer.state_dict())
    history = fresh.state[model[0].weight]["history"]
    assert isinstance(history, deque)
    assert [float(value.sum()) for value in history] == [16, 0]


def test_states_without_a_name_are_refused() -> None:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[(1, 2)] = {"n": 1}  # type: ignore[index]
    with pytest.raises(ValueError, match=r"SGD keeps a state under \(1, 2\), .* use a string"):
        optimizer_state(model, optimizer)


def test_parameters_that_only_one_optimizer_has_are_named() -> None:
    model = build()
    saved = optimizer_state(model, SGD(model[0].parameters()))
    with pytest.warns(UserWarning, match=r"begin anew: 1.bias, 1.weight; not updated any more: 0.bias, 0.weight"):
        restore_optimizer(model, SGD(model[1].parameters()), saved)


def test_tied_parameters_have_one_value() -> None:
    model = build()
    values = {name: value.clone() for name, value in model_state(model).items()}
    restore_model(model, values)
    values["2.weight"] += 1
    with pytest.raises(ValueError, match=r"0.weight and 2.weight are one parameter .* different values"):
        restore_model(model, values)


def test_names_do_not_tell_of_wrappers() -> None:
    """And one name of a tied parameter is enough."""
    plain, wrapped = build(), build(seed=1)
    wrapped[0] = torch.compile(wrapped[0])  # type: ignore[assignment]
    wrapped[1] = checkpoint_wrapper(wrapped[1])
    assert model_state(wrapped).keys() == model_state(plain).keys()
    state = model_state(plain)
    assert state["0.weight"] is state["2.weight"]
    restore_model(wrapped, {name: value for name, value in state.items() if name != "0.weight"})
    assert all(torch.equal(value, state[name]) for name, value in model_state(wrapped).items())
    assert wrapped[0].weight is wrapped[2].weight
