"""Generates text: one answer, or a conversation that is read from the standard input.

::

    line of the input -- rank 0 reads, all get it --> chat template, if any --> generate --> printed as it comes
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging as transformers_logging

from lightning_automodel.command.quiet import warnings_only
from lightning_automodel.command.trained import make_trainer, opened
from lightning_automodel.finetuning.causal_lm import CausalLM
from lightning_automodel.finetuning.pretrained import TOKENIZER, Pretrained, looked_up
from lightning_automodel.finetuning.tokenizers import of_lookup
from lightning_automodel.finetuning.trust import UNTRUSTED, asking_trust, trusts

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


def generate(
    model: str,
    prompt: str | None = None,
    system: str | None = None,
    tokenizer: str | None = None,
    tp: int | None = None,
    precision: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
    sampling: Sampling = Sampling(),
) -> None:
    """Generates text with a checkpoint, an export or a model of the hub; converses where there is a chat template.

    Args:
        model: checkpoint, directory that save_pretrained or export wrote (of an adapter, too), or name on the hub.
        prompt: what is answered; by default each line of the standard input.
        system: instruction before a conversation.
        tokenizer: directory or name; by default the model's.
        tp: ranks among which the model is split; by default as many as its weights need.
        precision: of the trainer; by default bf16-true on CUDA, else 32-true.
        model_kwargs: more arguments of from_pretrained, as in training: --model_kwargs.trust_remote_code=true.
        sampling: how tokens are chosen.
    """
    transformers_logging.disable_progress_bar()
    with opened(model, trusts=trusts(model_kwargs)) as source, warnings_only(*_LOGGERS):
        found = Pretrained.of(source)
        name = tokenizer or found.holder_of(TOKENIZER)
        with looked_up(name), asking_trust(name, "model_kwargs"):
            loaded = AutoTokenizer.from_pretrained(name, **{**UNTRUSTED, **of_lookup(model_kwargs)})
        speaker = _Speaker(source, model_kwargs, loaded, [prompt] if prompt is not None else None, system, sampling)
        make_trainer(found.model, tp, None, precision).predict(speaker, DataLoader([0]), return_predictions=False)  # type: ignore[arg-type]


class _Speaker(CausalLM):
    """Answers prompts within one prediction step, so that all ranks of the model go through them together."""

    def __init__(
        self,
        model: str,
        model_kwargs: dict[str, Any] | None,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[str] | None,
        system: str | None,
        sampling: Sampling,
    ) -> None:
        super().__init__(model, model_kwargs=model_kwargs)
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.sampling = sampling
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        if system is not None and not tokenizer.chat_template:
            raise ValueError(f"system={system!r} needs a chat template, and the tokenizer has none")

    def predict_step(self, batch: Any, batch_idx: int) -> int:  # type: ignore[override]
        """Answers all prompts, and returns how many there were; ``batch`` says nothing."""
        number = -1
        for number, prompt in enumerate(self._prompts()):
            torch.manual_seed(self.sampling.seed + number)
            print_here = self.trainer.is_global_zero
            streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if print_here else None
            ids = self._ids(prompt).to(self.device)  # [1, tokens]
            answer = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=streamer,
                pad_token_id=self._padding(),
                synced_gpus=False,  # all ranks choose the same tokens
                **self.sampling.arguments(),
            )[0, ids.shape[1] :]
            if self.tokenizer.chat_template:
                text = self.tokenizer.decode(answer, skip_special_tokens=True)
                self.messages.append({"role": "assistant", "content": text})
        return number + 1

    def _prompts(self) -> Iterator[str]:
        if self.prompts is not None:
            yield from self.prompts
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

    def _ids(self, prompt: str) -> Tensor:
        if not self.tokenizer.chat_template:
            return self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        self.messages.append({"role": "user", "content": prompt})
        text = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]

    def _padding(self) -> int:
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in candidates if token is not None)
