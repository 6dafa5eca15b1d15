"""The tiny checkpoint of the tests of fine-tuning."""

from tests.finetuning.conftest import model_dir, tokenizer

__all__ = ["model_dir", "tokenizer"]
