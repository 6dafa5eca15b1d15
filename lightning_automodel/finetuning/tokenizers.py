"""Finds and reads what stands beside a model, a tokenizer or a processor, and checks that the two belong together."""

from collections.abc import Mapping
from json import JSONDecodeError
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lightning_automodel.finetuning.pretrained import looked_up
from lightning_automodel.finetuning.trust import UNTRUSTED, asking_trust

_OF_LOOKUP = ("trust_remote_code", "revision", "token", "cache_dir", "local_files_only", "proxies")


def tokenizer_name_of(module: Any) -> str | None:
    """Return what a LightningModule's model was trained with (``tokenizer_name``), by default what it is read from
    (``model_name``); ``None`` if it says neither.
    """
    return getattr(module, "tokenizer_name", None) or getattr(module, "model_name", None)


def of_lookup(kwargs: Any) -> dict[str, Any]:
    """Return those arguments of a model's ``from_pretrained`` that hold for its tokenizer, too: where to look."""
    return {key: kwargs[key] for key in _OF_LOOKUP if key in kwargs} if isinstance(kwargs, Mapping) else {}


def load_beside(auto_class: Any, field: str, name: str | None, kwargs: Mapping[str, Any] | None, module: Any) -> Any:
    """Loads what stands beside a model: a tokenizer, or a processor.

    Args:
        auto_class: of transformers, such as ``AutoTokenizer``.
        field: that holds ``name``, for errors; ``kwargs`` are those of ``{field}_kwargs``.
        name: directory, or name on the hub; ``None``: that of the module's model, found where that is.
        kwargs: more arguments of ``from_pretrained``.
        module: that is trained.

    Raises:
        ValueError: if neither says a name, or it leads nowhere, to none, or to code that nobody has allowed to run.
    """
    found, lookup, where = name, {}, f"{field}_kwargs"
    if found is None:
        found, where = tokenizer_name_of(module), "model_kwargs"
        lookup = of_lookup(getattr(module, where, None))
    if found is None:
        raise ValueError(
            f"{field}=None takes the {field} of the module's `model_name`, and there is none; give {field}=<name or "
            "directory>"
        )
    with looked_up(found), asking_trust(found, where):
        try:
            return auto_class.from_pretrained(found, **{**UNTRUSTED, **lookup, **(kwargs or {})})
        except (ValueError, ImportError) as error:
            if isinstance(error, JSONDecodeError) or "trust_remote_code" in str(error):
                raise  # those around know better
            first = " ".join(str(error).split()).partition(". ")[0]
            raise ValueError(
                f"no {field} can be read from {found!r} ({first}); give {field}=<name or directory of another>"
            ) from error


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that fills rows: any will do, because no label and no mask counts it."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if token is not None)


def check_vocabulary(config: PreTrainedConfig, data: Any) -> None:
    """Refuses data with tokens that a model does not embed.

    Args:
        config: of the model.
        data: a data module; if it has ``largest_token``, the largest id that was read, that is looked at.

    Raises:
        ValueError: naming both sizes.
    """
    largest = getattr(data, "largest_token", -1)
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and largest >= size:
        tokenizer = data.loaded_tokenizer
        raise ValueError(
            f"the data hold token {largest} of tokenizer {tokenizer.name_or_path!r} ({len(tokenizer)} tokens), and the "
            f"model embeds {size} (0 to {size - 1}); use the model's own tokenizer, or a model whose embeddings were "
            "resized (model.resize_token_embeddings) and saved"
        )
