"""Generates text: one answer, or a conversation that is read from the standard input.

::

    line of the input -- rank 0 reads, all get it --> chat template, if any --> generate --> printed as it comes
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging as transformers_logging

from lightning_automodel.command.quiet import warnings_only
from lightning_automodel.command.trained import make_trainer, opened
from lightning_automodel.finetuning.causal_lm import CausalLM
from lightning_automodel.finetuning.image_text import ImageTextLM, is_image_text, process
from lightning_automodel.finetuning.pretrained import Pretrained, check_kind
from lightning_automodel.finetuning.tokenizers import load_beside, padding_of
from lightning_automodel.finetuning.trust import trusts

_LOGGERS = ("lightning_automodel", "lightning.pytorch", "lightning.fabric")  # the terminal is the conversation's


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: of an answer, at most.
        temperature: 0 takes the likeliest token each time.
        top_p: share of the probability among which is drawn.
        seed: of the draws.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")

    def arguments(self) -> dict[str, Any]:
        """Return those of ``generate``."""
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        chosen = drawn if self.temperature else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        # A model's own config may say beams, whose words do not come one by one.
        return {"max_new_tokens": self.max_new_tokens, "num_beams": 1, **chosen}


@dataclass(frozen=True)
class Talk:
    """What is asked, and how it is answered.

    Attributes:
        prompts: ``None``: lines of the standard input.
        system: instruction before a conversation.
        images: files that stand before the first prompt.
        sampling: how tokens are chosen.
    """

    prompts: list[str] | None
    system: str | None
    images: list[str]
    sampling: Sampling


def generate(
    model: str,
    prompt: str | None = None,
    system: str | None = None,
    tokenizer: str | None = None,
    tp: int | None = None,
    precision: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
    image: list[str] | str | None = None,
    sampling: Sampling = Sampling(),
) -> None:
    """Generates text with a checkpoint, an export or a model of the hub; converses where there is a chat template.

    Args:
        model: checkpoint, directory that save_pretrained or export wrote (of an adapter, too), or name on the hub.
        prompt: what is answered; by default each line of the standard input.
        system: instruction before a conversation.
        tokenizer: directory or name, of the processor of a model that reads images; by default the model's.
        tp: ranks among which the model is split; by default as many as its weights need.
        precision: of the trainer; by default bf16-true on CUDA, else 32-true.
        model_kwargs: more arguments of from_pretrained, as in training: --model_kwargs.trust_remote_code=true.
        image: files of images that stand before the first prompt, for a model that reads them.
        sampling: how tokens are chosen.

    Raises:
        ValueError: for files that are not there, a model that reads no images, or no chat template where one is needed.
    """
    images = [image] if isinstance(image, str) else image or []
    if missing := [path for path in images if not Path(path).is_file()]:
        raise ValueError(f"image={missing[0]!r} is no file (here: {Path.cwd()}); give files of images")
    transformers_logging.disable_progress_bar()
    with opened(model, trusts=trusts(model_kwargs)) as source, warnings_only(*_LOGGERS):
        found = Pretrained.of(source)
        config, _ = found.find_config(model_kwargs or {})
        kind = _ImageSpeaker if images or is_image_text(config) else _Speaker
        check_kind(found.model, config, kind.auto_class, kind.known_configs)
        speaker = kind(source, model_kwargs=model_kwargs)
        trust = {"trust_remote_code": trusts(model_kwargs)}
        reader = load_beside(kind.reads_with, "tokenizer", tokenizer, trust, speaker)
        speaker.begin(reader, Talk([prompt] if prompt is not None else None, system, images, sampling))
        make_trainer(found.model, tp, None, precision).predict(speaker, DataLoader([0]), return_predictions=False)  # type: ignore[arg-type]


class _Speaker(CausalLM):
    """Answers prompts within one prediction step, so that all ranks of the model go through them together."""

    reads_with: Any = AutoTokenizer

    def begin(self, reader: Any, talk: Talk) -> None:
        """Take what is asked.

        Args:
            reader: the tokenizer, or the processor.
            talk: what is asked, and how.

        Raises:
            ValueError: if there is no chat template where one is needed.
        """
        self.reader, self.talk = reader, talk
        self.messages: list[dict[str, Any]] = []
        if talk.system is not None:
            self._check_template(f"system={talk.system!r}")
            self.messages.append({"role": "system", "content": self._content(talk.system)})

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the reader."""
        return self.reader

    def predict_step(self, batch: Any, batch_idx: int) -> int:  # type: ignore[override]
        """Answers all prompts, and returns how many there were; ``batch`` says nothing."""
        number = -1
        for number, prompt in enumerate(self._prompts()):
            torch.manual_seed(self.talk.sampling.seed + number)
            print_here = self.trainer.is_global_zero
            streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if print_here else None
            inputs = {name: value.to(self.device) for name, value in self._inputs(prompt).items()}
            answer = self.model.generate(
                **inputs,
                streamer=streamer,
                pad_token_id=padding_of(self.tokenizer),
                synced_gpus=False,  # all ranks choose the same tokens
                **self.talk.sampling.arguments(),
            )[0, inputs["input_ids"].shape[1] :]
            if self.reader.chat_template:
                text: Any = self.tokenizer.decode(answer, skip_special_tokens=True)
                self.messages.append({"role": "assistant", "content": self._content(text)})
        return number + 1

    def _prompts(self) -> Iterator[str]:
        if self.talk.prompts is not None:
            yield from self.talk.prompts
            return
        while (line := self._next_line()) is not None:
            if line.strip():
                yield line

    def _next_line(self) -> str | None:
        """Read a line on rank 0, and give it to all; ``None`` at the end of the input."""
        line: list[str | None] = [None]
        if self.trainer.is_global_zero:
            if sys.stdin.isatty():
                print("> ", end="", flush=True)
            line = [sys.stdin.readline() or None]
        if dist.is_initialized():
            dist.broadcast_object_list(line)
        return None if line[0] is None else line[0].rstrip("\n")

    def _inputs(self, prompt: str) -> dict[str, Tensor]:
        """Return what the model reads, one row each: the conversation so far, or the prompt alone."""
        text: Any = prompt
        if self.reader.chat_template:
            self.messages.append({"role": "user", "content": self._content(prompt)})
            text = self.reader.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
        special = not self.reader.chat_template  # which writes them itself
        ids = self.tokenizer(text, add_special_tokens=special, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _content(self, text: str) -> Any:
        return text

    def _check_template(self, what: str) -> None:
        if not self.reader.chat_template:
            reader = self.reads_with.__name__.removeprefix("Auto").lower()
            raise ValueError(f"{what} needs a chat template, and the {reader} has none")


class _ImageSpeaker(_Speaker, ImageTextLM):
    """The same of a model that reads images."""

    reads_with = AutoProcessor

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the processor."""
        return self.reader.tokenizer

    def begin(self, reader: Any, talk: Talk) -> None:
        """Take what is asked; the arguments are those of text."""
        super().begin(reader, talk)
        self._check_template("a model that reads images")

    def _inputs(self, prompt: str) -> dict[str, Tensor]:
        shown = [{"type": "image", "image": path} for path in self.talk.images if not self._has_spoken()]
        self.messages.append({"role": "user", "content": [*shown, *self._content(prompt)]})
        return process(self.reader, [self.messages], add_generation_prompt=True)

    def _has_spoken(self) -> bool:
        return any(message["role"] == "user" for message in self.messages)

    def _content(self, text: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text}]
