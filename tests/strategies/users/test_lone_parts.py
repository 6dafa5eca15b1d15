"""What users compute with parts of a model outside of its forward pass, against one process: embeddings, decoders
without their heads, heads, towers.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig, CLIPVisionModel

from lightning_automodel import FSDP2Config
from lightning_automodel.modules import structure
from lightning_automodel.testing.pool import Nursery
from tests.strategies.users.test_habits_of_steps import Steps, compare
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.training import HIDDEN, VOCABULARY, tiny_llama

WIDTH, PATCHES = 24, 4


class Parts(Steps):
    """One model; a micro-batch of 8 tokens per row, which two axes can cut."""

    tied = True

    def configure_model(self) -> None:
        if self.model is None:
            self.numbers, self.model = [], tiny_llama(type(self).tied)
            self.change()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.of_ids(torch.cat([batch[0], batch[0][:, :2]], dim=1))

    def of_ids(self, ids: Tensor) -> Tensor:
        raise NotImplementedError


def shifted(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Embedded(Parts):
    def of_ids(self, ids: Tensor) -> Tensor:
        embedded = self.model.get_input_embeddings()(ids)
        return self.model(inputs_embeds=1.1 * embedded, labels=ids).loss + embedded.square().mean()


class WithoutHead(Parts):
    tied = False

    def of_ids(self, ids: Tensor) -> Tensor:
        hidden = self.model.model(ids).last_hidden_state
        return shifted(self.model.lm_head(hidden), ids) + hidden.mean()


class Early(Parts):
    """An exit behind the first block, by the model's own norm and head, beside the model's own loss."""

    def of_ids(self, ids: Tensor) -> Tensor:
        output = self.model(input_ids=ids, labels=ids, output_hidden_states=True)
        return output.loss + shifted(self.model.lm_head(self.model.model.norm(output.hidden_states[1])), ids)


class SoftPrompt(Parts):
    def change(self) -> None:
        self.model.requires_grad_(False)
        self.prompt = nn.Embedding(2, HIDDEN)
        with torch.no_grad():
            self.prompt.weight.copy_(torch.linspace(-1, 1, 2 * HIDDEN).view(2, HIDDEN))

    def of_ids(self, ids: Tensor) -> Tensor:
        prompt = self.prompt(torch.arange(2)).expand(len(ids), -1, -1)
        inputs = torch.cat([prompt, self.model.get_input_embeddings()(ids)], dim=1)
        return self.model(inputs_embeds=inputs, labels=functional.pad(ids, (2, 0), value=-100)).loss


class Adversarial(Parts):
    """Two backward passes: the second one's embeddings are moved along the gradient of the first."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        ids, optimizer = torch.cat([batch[0], batch[0][:, :2]], dim=1), self.optimizers()
        embedded = self.model.get_input_embeddings()(ids)
        embedded.retain_grad()
        self.manual_backward(self.model(inputs_embeds=embedded, labels=ids).loss)
        moved = self.model.get_input_embeddings()(ids) + 0.1 * embedded.grad.sign()  # type: ignore[union-attr]
        self.manual_backward(self.model(inputs_embeds=moved, labels=ids).loss)
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]


class Recomputed(Parts):
    def of_ids(self, ids: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: self.model.model(x).last_hidden_state, ids, use_reentrant=False)
        return shifted(checkpoint(self.model.lm_head, hidden, use_reentrant=False), ids)


class InTurn(Parts):
    """Micro-batches of the embedding alone, of the head alone, of the whole, and reads in between."""

    tied = False

    def of_ids(self, ids: Tensor) -> Tensor:
        self.count = vars(self).get("count", -1) + 1
        with torch.no_grad():
            hidden = self.model.get_input_embeddings()(ids)
            self.numbers.append(float(self.all_gather(self.model.lm_head(hidden).square().mean()).mean()))
        if self.count % 3 == 0:
            return self.model.get_input_embeddings()(ids).square().mean()
        return self.model.lm_head(hidden).square().mean() if self.count % 3 == 1 else self.model(ids, labels=ids).loss


class InTurnByUnits(InTurn):
    """With units of their own for embedding and head, which FSDP2 sees before their model."""

    def configure_model(self) -> None:
        structure.LARGE = 0
        super().configure_model()


class OverBlocks(Parts):
    """A loop of one's own over the blocks, which looks at all tokens between them; the second is computed again."""

    def of_ids(self, ids: Tensor) -> Tensor:
        model = self.model.model
        hidden = model.embed_tokens(ids)
        rotation = model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
        hidden = model.layers[0](hidden, position_embeddings=rotation)
        hidden = hidden + hidden.cumsum(dim=1) / 10
        hidden = checkpoint(model.layers[1], hidden, position_embeddings=rotation, use_reentrant=False)
        return shifted(self.model.lm_head(model.norm(hidden)), ids)


class OnceMore(Parts):
    """The first block once more, on what a later one gave."""

    def of_ids(self, ids: Tensor) -> Tensor:
        output, model = self.model(input_ids=ids, labels=ids, output_hidden_states=True), self.model.model
        rotation = model.rotary_emb(output.hidden_states[1], torch.arange(ids.shape[1])[None])
        again = model.layers[0](output.hidden_states[1], position_embeddings=rotation)
        return output.loss + again[:, -1].square().mean()


class HookedModel(Parts):
    """Its hook around the model sees what one process's does, and no parts."""

    def change(self) -> None:
        self.model.register_forward_hook(lambda module, args, output: self.numbers.append(len(output.logits.shape)))

    def of_ids(self, ids: Tensor) -> Tensor:
        return self.model(inputs_embeds=self.model.get_input_embeddings()(ids), labels=ids).loss


def tiny_clip() -> CLIPModel:
    layers: dict[str, Any] = {
        **{"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "projection_dim": HIDDEN,
    }
    text = CLIPTextConfig(vocab_size=VOCABULARY, max_position_embeddings=16, eos_token_id=VOCABULARY - 1, **layers)
    vision = CLIPVisionConfig(image_size=8, patch_size=4, **layers)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=HIDDEN))


def pixels(ids: Tensor) -> Tensor:
    return torch.sin(ids[:, :3, None, None] + torch.arange(64).view(1, 1, 8, 8) / 10)


class Contrast(Parts):
    def configure_model(self) -> None:
        if self.model is None:
            self.numbers, self.model = [], tiny_clip()

    def of_ids(self, ids: Tensor) -> Tensor:
        text = self.model.get_text_features(input_ids=ids).pooler_output
        image = self.model.get_image_features(pixel_values=pixels(ids)).pooler_output
        return -functional.cosine_similarity(text, image).mean()


class Glued(Parts):
    """A vision tower, which has no tensor-parallel plan, a projection and a language model."""

    def change(self) -> None:
        self.tower, self.projection = CLIPVisionModel(tiny_clip().config.vision_config), nn.Linear(WIDTH, HIDDEN)
        weights = tiny_clip().vision_model.state_dict()
        self.tower.load_state_dict(weights)
        with torch.no_grad():
            self.projection.weight.copy_(torch.linspace(-1, 1, WIDTH * HIDDEN).view(HIDDEN, WIDTH).sin())
            self.projection.bias.zero_()

    def of_ids(self, ids: Tensor) -> Tensor:
        image = self.projection(self.tower(pixel_values=pixels(ids)).last_hidden_state[:, 1:])
        inputs = torch.cat([image, self.model.get_input_embeddings()(ids)], dim=1)
        return self.model(inputs_embeds=inputs, labels=functional.pad(ids, (PATCHES, 0), value=-100)).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.003)  # with more the tower amplifies rounding


class Bare(Parts):
    """A model without a head, which runs its blocks itself: its embedding and its norm alone, in front and behind."""

    def change(self) -> None:
        self.model, self.head = self.model.model, nn.Linear(HIDDEN, VOCABULARY, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-1, 1, VOCABULARY * HIDDEN).view(VOCABULARY, HIDDEN).sin())

    def of_ids(self, ids: Tensor) -> Tensor:
        embedded = self.model.get_input_embeddings()(ids)
        output = self.model(inputs_embeds=1.1 * embedded + embedded.flip(1), output_hidden_states=True)
        early = self.model.norm(output.hidden_states[1])
        return shifted(self.head(output.last_hidden_state + early), ids)


class Newlines(Parts):
    """Features of images by a method of the model that reads a parameter of its own behind the tower."""

    def configure_model(self) -> None:
        if self.model is None:
            self.numbers, self.model = [], tiny_model("llava_next")

    def of_ids(self, ids: Tensor) -> Tensor:
        images = torch.sin(ids[:, :2, None, None, None] + torch.arange(3 * 56 * 56).view(1, 1, 3, 56, 56) / 10)
        found = self.model.get_image_features(images, image_sizes=torch.full((len(ids), 2), 56)).pooler_output
        inputs = torch.cat([torch.stack(list(found)), self.model.get_input_embeddings()(ids)], dim=1)
        hidden = self.model.model.language_model(inputs_embeds=inputs).last_hidden_state
        return shifted(self.model.lm_head(hidden[:, -ids.shape[1] :]), ids)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


BY_FEW = ("fsdp2-dp2", "fsdp2-tp2", "fsdp2-cp2", "ddp-2", "fsdp2-dp2-tp2", "fsdp2-cp2-tp2")
KINDS = (
    *(Embedded, WithoutHead, Early, SoftPrompt, Adversarial, Recomputed, InTurn, InTurnByUnits, HookedModel),
    *(OverBlocks, OnceMore, Contrast, Glued, Bare, Newlines),
)
WITHOUT_PLAN = (Contrast,)
LEAVING_OUT = (InTurn, Contrast, Glued, Newlines)
"""Kinds whose passes leave parameters out, which is an error of torch's under DDP."""
ALL = [
    (kind, layout)
    for kind in KINDS
    for layout in BY_FEW
    if not (kind in WITHOUT_PLAN and "tp2" in layout) and not (issubclass(kind, LEAVING_OUT) and layout == "ddp-2")
]
FAST = [
    *((kind, "fsdp2-dp2") for kind in (Early, OverBlocks, Glued, OnceMore)),
    *((kind, "fsdp2-tp2") for kind in (WithoutHead, Early, Glued, Newlines)),
    (InTurnByUnits, "fsdp2-dp2-tp2"),
    *((kind, "fsdp2-cp2") for kind in (Embedded, Bare)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), with_long(ALL, *(case for case in ALL if case not in FAST)))
def test_steps_are_those_of_one_process(kind: type[Steps], layout: str, nursery: Nursery) -> None:
    compare(nursery, kind, layout)


@pytest.mark.parametrize(
    "kind", with_long([Embedded, WithoutHead, Early, OverBlocks, OnceMore, Glued], Embedded, Early, OnceMore)
)
def test_on_a_cut_sequence(kind: type[Steps], nursery: Nursery) -> None:
    config = FSDP2Config(sequence_parallel=True, activation_checkpointing=True)
    compare(nursery, kind, "fsdp2-tp2", config=config)
