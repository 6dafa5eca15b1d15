"""Low-rank adapters on split layers: exact, with the collectives of the model without them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.plans import derive_layout, select_plan
from lightning_automodel.testing.pool import Pool
from tests.plans.support import BOUND, SCHEDULE, build_llama
from tests.support.comparison import compare
from tests.support.families import tiny_model
from tests.support.training import HIDDEN, Recorder, batches, make_trainer

TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


class Adapted(nn.Module):
    """What peft puts in the place of a linear layer, in short."""

    def __init__(self, base_layer: nn.Linear, bent: bool = False) -> None:
        super().__init__()
        self.base_layer, self.bent = base_layer, bent
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base_layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A["default"](x)
        return self.base_layer(x) + 2.0 * self.lora_B["default"](low.tanh() if self.bent else low)


def adapted(bent: bool = False) -> nn.Module:
    """With one layer whose adapter bends what a row style makes of slices."""
    model = build_llama().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in TARGETS:
            wrapper = Adapted(module, bent and name.endswith("0.mlp.down_proj"))
            model.set_submodule(name, wrapper)
    return model


def with_peft(model: nn.Module | None = None, targets: Sequence[str] = TARGETS) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    targets = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, bias="none")
    return inject_adapter_in_model(config, model or build_llama())


def beside_experts() -> nn.Module:
    """On attention and, of one family, on the router."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate")
    return with_peft(tiny_model("qwen3_moe"), targets)


def error(build: Callable[[], nn.Module], sequence_parallel: bool) -> tuple[float, str]:
    """Runs on each rank."""
    config = FSDP2Config(sequence_parallel=sequence_parallel)
    return compare(build, {"tp": 2}, 2, SCHEDULE, config).largest


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_adapters_are_exact(sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(error, adapted, sequence_parallel):
        assert found[0] <= BOUND, found


@pytest.mark.slow
def test_adapters_of_peft_are_exact(pool2: Pool) -> None:
    for build in (with_peft, beside_experts):
        for found in pool2.run(error, build, False):
            assert found[0] <= BOUND, (build, found)


def test_the_same_modules_take_collectives() -> None:
    plain, model = build_llama(), adapted()
    expected = derive_layout(plain, select_plan(plain), 2)
    layout = derive_layout(model, select_plan(model), 2)
    assert layout.boundaries == expected.boundaries
    inside = {name for name in layout.modules if name not in expected.modules}
    assert inside == set()


def refused() -> str:
    """Runs on each rank."""
    try:
        compare(lambda: adapted(bent=True), {"tp": 2}, 2, SCHEDULE)
    except ValueError as problem:
        return str(problem)
    return ""


def test_an_adapter_that_is_not_linear_is_refused(pool2: Pool) -> None:
    for message in pool2.run(refused):
        assert "model.layers.0.mlp (LlamaMLP) is summed over the tp ranks as a whole" in message
        assert "tanh is not a linear function of it" in message


# ---- what comes too late ---------------------------------------------------------------------------------------------


def too_late() -> list[str]:
    """Runs on each rank: a new head, and more tokens, for a model that is parallel."""
    module = Recorder()
    make_trainer({"tp": 2}, max_steps=1).fit(module, batches(1))
    changes = (
        lambda: module.model.resize_token_embeddings(99),
        lambda: setattr(module.model, "lm_head", nn.Linear(HIDDEN, 61)),
        lambda: make_trainer({"tp": 2}, max_steps=1).fit(module, batches(1)),
    )
    messages = []
    for change in changes:
        try:
            change()
        except ValueError as problem:
            messages.append(str(problem))
    return messages


def test_changes_of_a_parallel_model_are_refused(pool2: Pool) -> None:
    for resize, head in pool2.run(too_late, trainer=True):
        assert "resize_token_embeddings of a LlamaForCausalLM that was made parallel already" in resize
        assert "model.lm_head.weight and 1 more: added to a model that was made parallel already" in head


class AdaptedInHook(Recorder):
    """Adds an adapter of peft in a hook, to a model that has one or none, with no optimizer to train it."""

    def __init__(self, hook: str, has_one: bool) -> None:
        super().__init__(tied=False)
        self.has_one = has_one
        setattr(self, hook, self._add)

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model = get_peft_model(self.model, self._config()) if self.has_one else self.model

    def _add(self, *args: Any) -> None:
        if self.has_one:
            self.model.add_adapter("late", self._config())
            self.model.set_adapter("late")
        else:
            self.model = get_peft_model(self.model, self._config())

    def _config(self) -> LoraConfig:
        return LoraConfig(r=3, target_modules=["q_proj", "o_proj"], init_lora_weights=False)


def refusals_of_late_adapters() -> list[str]:
    """Runs on each rank."""
    cases = [
        (1, "on_fit_start", True),
        (2, "on_fit_start", False),
        (2, "on_train_start", True),
        (2, "on_validation_start", False),
        (2, "on_train_batch_end", False),  # of the first batch
    ]
    messages = []
    for tp, hook, has_one in cases:
        trainer, module = make_trainer({"tp": tp}, max_steps=2), AdaptedInHook(hook, has_one)
        run = trainer.validate if hook == "on_validation_start" else trainer.fit
        with pytest.raises(ValueError, match="added to a model that is parallel already") as caught:
            run(module, batches(2 // tp))
        messages.append(str(caught.value))
    return messages


def test_adapters_that_hooks_add_to_a_parallel_model_are_refused(pool2: Pool) -> None:
    for messages in pool2.run(refusals_of_late_adapters, trainer=True):
        for message in messages:
            assert "lora_A" in message
            assert "and 7 more" in message
            assert "add it in configure_model, behind from_pretrained" in message
