"""What one model gives goes into another: gradients cross the border between them as on one process."""

import copy

import torch
from torch import Tensor, nn

from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.families import tiny_model
from tests.support.training import whole

BOUND = 5e-5


def draw(length: int) -> Tensor:
    return torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(length))


def hidden_to_model(base: nn.Module, model: nn.Module, given: Tensor) -> Tensor:
    """Hidden states of a base model, some of them, in front of what the user gives; and those of the second pass."""
    ids = draw(11)
    first = base(input_ids=draw(20)).last_hidden_state[:, -7:]
    second = model(inputs_embeds=torch.cat([first, given], 1), output_hidden_states=True).hidden_states[-1][:, 7:]
    return model(inputs_embeds=second, labels=ids).loss


def logits_to_model(base: nn.Module, model: nn.Module, given: Tensor) -> Tensor:
    """Logits of one pass in the next one, which is too short to be cut in a third."""
    soft = model(inputs_embeds=given).logits[..., : given.shape[-1]].softmax(-1)
    return model(inputs_embeds=soft, labels=draw(11)).loss + model(inputs_embeds=soft[:, :3], labels=draw(3)).loss


def errors_of_chains() -> dict[str, float]:
    """Runs on each rank: of every gradient, those of what the user gives too, and of the loss."""
    references = tiny_model("llama").model, tiny_model("qwen3")
    mesh = build_mesh(resolve_sizes(2, cp=2), "cpu")
    models = [parallelize(copy.deepcopy(model), mesh) for model in references]
    found: dict[str, float] = {}
    for chain in (hidden_to_model, logits_to_model):
        sides: list[dict[str, Tensor]] = []
        for base, model in (references, models):
            given = torch.randn(2, 11, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
            parts = nn.ModuleList([base.train(), model.train()])
            parts.zero_grad()
            loss = chain(base, model, given.requires_grad_())
            loss.backward()
            named = {n: whole(p.grad) for n, p in parts.named_parameters() if p.grad is not None}
            sides.append({**named, "loss": loss.detach(), "given": given.grad})
        assert sides[0].keys() == sides[1].keys()
        for name, expected in sides[0].items():
            found[f"{chain.__name__} {name}"] = float((sides[1][name] - expected).norm() / expected.norm())
    return found


def test_gradients_cross_from_model_to_model(pool2: Pool) -> None:
    for result in pool2.run(errors_of_chains):
        assert {name: error for name, error in result.items() if not error < BOUND} == {}
