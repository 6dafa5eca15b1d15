"""Finds what a pretrained model is read from, and says what is wrong with it: a name that leads nowhere, a kind or a
size that does not fit.
"""

import json
import os
import re
from collections.abc import Container, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.quantizers import AutoQuantizationConfig

from lightning_automodel.checkpointing.hugging_face.models import ADAPTER_CONFIG, holds_adapters
from lightning_automodel.config.proposals import proposal
from lightning_automodel.finetuning.trust import UNTRUSTED, asking_trust

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER = "tokenizer_config.json"
OF_WEIGHTS = ("dtype", "torch_dtype", "quantization_config")  # in a config they say what its files hold


@dataclass(frozen=True)
class Pretrained:
    """What a model is read from: directories, or names on the hub.

    Attributes:
        model: config and weights.
        adapter: what peft wrote, which is added to them; ``None`` without one.
    """

    model: str
    adapter: str | None = None

    @classmethod
    def of(cls, name: str | os.PathLike[str]) -> Self:
        """Finds what ``name`` stands for: a model, or an adapter, whose directory names the model that it was made for.

        Raises:
            ValueError: for an adapter that does not say so.
        """
        name = as_name(name)
        if not holds_adapters(Path(name)):
            return cls(name)
        return cls(_base_of(Path(name)), name)

    def added(self, peft: Any) -> Any:
        """Return what is added to the model: its adapter, else ``peft``, a config or what :func:`as_name` takes.

        Raises:
            ValueError: for both.
        """
        if self.adapter is None:
            return as_name(peft) if isinstance(peft, str | os.PathLike) else peft
        if peft is not None:
            raise ValueError(
                f"model={self.adapter!r} is an adapter, and peft={peft!r} would be a second one; leave one of them "
                f"out, or merge the first into its base ({self.model!r}) and train that"
            )
        return self.adapter

    def holder_of(self, file: str) -> str:
        """Return where to read what ``file`` describes: the adapter's directory if it holds that, else the model's."""
        adapter = self.adapter
        return adapter if adapter is not None and (Path(adapter) / file).is_file() else self.model

    def check(self, *, from_scratch: bool = False) -> None:
        """Refuses a directory that ``from_pretrained`` could not load. Names on the hub pass.

        Args:
            from_scratch: it needs a config alone.

        Raises:
            ValueError: naming the directory, what it lacks and the way out.
        """
        with self._named():
            check_weights(self.model, from_scratch)

    def find_config(self, kwargs: Mapping[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
        """Reads the config of the model; arguments, results and errors are those of :func:`find_config`."""
        with self._named():
            return find_config(self.model, kwargs)

    @contextmanager
    def _named(self) -> Generator[None, None, None]:
        """Names the adapter, and where it says which model is its base, in errors about that within this context."""
        try:
            yield
        except ValueError as error:
            if self.adapter is None:
                raise
            raise ValueError(
                f"model={self.adapter!r} is an adapter of {self.model!r}, which cannot be read (here: {Path.cwd()}): "
                f"{error}. Give the base as model and the adapter as peft, or write where the base lies into "
                f"{Path(self.adapter) / ADAPTER_CONFIG} (base_model_name_or_path)"
            ) from error


def _base_of(folder: Path) -> str:
    path = folder / ADAPTER_CONFIG
    with looked_up(str(folder)):
        fields = json.loads(path.read_text())
    if not isinstance(fields, dict):
        raise ValueError(
            f"{str(path)!r} holds a {type(fields).__name__}, and not the fields of an adapter; copy or export it anew"
        )
    if not (base := fields.get("base_model_name_or_path")) or not isinstance(base, str):
        raise ValueError(
            f"model={str(folder)!r} is an adapter whose {path.name} does not say for which model "
            f"(base_model_name_or_path={base!r}); give that as model, and the adapter as peft"
        )
    return as_name(base)


def as_name(name: str | os.PathLike[str]) -> str:
    """Return a directory, or a name on the hub, as transformers and peft take it: text, without "~"."""
    return os.path.expanduser(os.fspath(name))


def check_weights(model: str, from_scratch: bool = False) -> None:
    """Refuses a directory that ``from_pretrained`` could not load. Names on the hub pass.

    Raises:
        ValueError: naming the directory, what it lacks and the way out.
    """
    directory = Path(model).expanduser()
    if not directory.is_dir():
        if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise ValueError(
                f"model={model!r} is not a directory; give one that save_pretrained wrote, or a name on the hub"
            )
        return
    wanted: Iterable[str] = ("config.json",) if from_scratch else _WEIGHTS
    if not any((directory / name).is_file() for name in wanted):
        held = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
        raise ValueError(
            f"model={model!r} has none of {', '.join(wanted)} (it holds {held}); give a directory that save_pretrained "
            "wrote" + ("" if from_scratch else ", or from_scratch=True for random weights from its config.json")
        )


@contextmanager
def looked_up(name: str) -> Generator[None, None, None]:
    """Looks ``name`` up as transformers does within this context: a directory, or else a name on the hub.

    Raises:
        ValueError: if it finds neither, what it says then need not hold the name; or if a file of the directory is
            damaged or missing.
    """
    try:
        yield
    except JSONDecodeError as error:
        raise ValueError(
            f"a file of {name!r} is no JSON, or not all of it ({error}); copy or download it anew"
        ) from error
    except OSError as error:
        first = str(error).strip().partition("\n")[0]
        if Path(name).expanduser().is_dir():
            raise ValueError(
                f"{name!r} cannot be read: {first} Give a directory that save_pretrained wrote, whole"
            ) from error
        raise ValueError(
            f"{name!r} is no directory (here: {Path.cwd()}), and the hub gave nothing of this name: {first} Check the "
            "path, or the name and the connection"
        ) from error


def read_config(
    source: Pretrained, kwargs: Mapping[str, Any], auto_class: type, known: Container[type]
) -> PreTrainedConfig:
    """Reads the config of a model, and refuses what ``auto_class`` does not load, or would load a part of.

    Args:
        source: of the model.
        kwargs: of ``from_pretrained``.
        auto_class: of transformers, such as ``AutoModelForCausalLM``.
        known: the classes of config that it knows.

    Raises:
        ValueError: for a kind that transformers does not know, an encoder-decoder, or another kind of model.
    """
    config, _ = source.find_config(kwargs)
    check_kind(source.model, config, auto_class, known)
    return config


def find_config(name: str, kwargs: Mapping[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Reads the config of a model of any kind that transformers knows, as ``from_pretrained`` does.

    Args:
        name: directory, or name on the hub.
        kwargs: of ``from_pretrained``: where to look, and fields of the config that replace what it says.

    Returns:
        The config; and those of ``kwargs`` that ``from_config`` takes beside it, or nobody.

    Raises:
        ValueError: if there is none, or it is of another kind.
    """
    beside = {key: kwargs[key] for key in ("trust_remote_code", *OF_WEIGHTS) if key in kwargs}
    asked = {key: value for key, value in {**UNTRUSTED, **kwargs}.items() if key not in OF_WEIGHTS}
    with looked_up(name), asking_trust(name, "model_kwargs"):
        try:
            config, unused = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **asked)
        except (KeyError, ValueError) as error:
            folder = Path(name).expanduser()
            if folder.is_dir() and not (folder / "config.json").is_file():
                raise ValueError(
                    f"model={name!r} has no config.json; give a directory that save_pretrained wrote, whole"
                ) from error
            if "trust_remote_code" in str(error):
                raise
            first = str(error).strip().partition(". ")[0]
            raise ValueError(
                f"model={name!r}: its config.json is of no model that transformers knows: {first}"
            ) from error
        except StrictDataclassError as error:
            raise _refused_value(name, error) from error
    return config, {**unused, **beside}


def _refused_value(name: str, error: StrictDataclassError) -> ValueError:
    rule = str(error).strip().splitlines()[-1].strip().partition(": ")[2]  # the first names the field alone
    return ValueError(
        f"model={name!r}: its config refuses a value: {rule}; mend it in model_kwargs, or in its config.json"
    )


@contextmanager
def taken_arguments(name: str, kwargs: Mapping[str, Any]) -> Generator[None, None, None]:
    """Builds the model ``name`` with these arguments within this context.

    Raises:
        ValueError: for one that neither its config nor its class takes, a value that its config refuses, or a dtype
            that torch does not have.
    """
    dtype = kwargs.get("dtype")
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"model_kwargs.dtype={dtype!r} is no dtype of torch; give one such as 'bfloat16', or 'auto'")
    try:
        yield
    except StrictDataclassError as error:
        raise _refused_value(name, error) from error
    except TypeError as error:
        refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if refused is None or refused[1] not in kwargs:
            raise
        config, _ = find_config(name, {key: value for key, value in kwargs.items() if key != refused[1]})
        fields = proposal(refused[1], config.to_dict(), "model_kwargs.") or "; leave it out"
        raise ValueError(
            f"model_kwargs.{refused[1]}: no field of {type(config).__name__}, and no argument of its model{fields}"
        ) from error


def check_kind(name: str, config: PreTrainedConfig, auto_class: type, known: Container[type]) -> None:
    """Refuses the model ``name`` where ``auto_class`` does not load it, or would load a part of it.

    Raises:
        ValueError: for an encoder-decoder, or another kind of model.
    """
    refuse_encoder_decoder(name, config)
    kind = type(config).__name__
    if not loads(auto_class, known, config):
        raise ValueError(
            f"model={name!r} ({kind}) is none that {auto_class.__name__} loads; build it in a LightningModule of yours"
        )


def loads(auto_class: type, known: Container[type], config: PreTrainedConfig) -> bool:
    """Tell whether ``auto_class`` loads a model: it knows the class of its config, or the model's own code."""
    return type(config) in known or auto_class.__name__ in (getattr(config, "auto_map", None) or {})


def refuse_encoder_decoder(name: str, config: PreTrainedConfig) -> None:
    """Check that ``CausalLM`` trains the model ``name``: of encoder-decoders some have a class of the decoder alone."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model={name!r} is an encoder-decoder ({type(config).__name__}); CausalLM trains decoders. Build it in a "
            "LightningModule of your own, with AutoModelForSeq2SeqLM: the strategies take it as it is"
        )


def with_quantization(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` in which a form of quantization that YAML names by its fields is one of
    transformers' configs, which it wants of files that hold a form already.

    Args:
        kwargs: ``quantization_config`` may be a dict with ``quant_method``.
    """
    fields = kwargs.get("quantization_config")
    if not isinstance(fields, dict) or "quant_method" not in fields:
        return kwargs
    return {**kwargs, "quantization_config": AutoQuantizationConfig.from_dict(fields)}
