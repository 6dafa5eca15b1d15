"""The tiny checkpoints of the tests of fine-tuning."""

from tests.finetuning.conftest import model_dir, tokenizer, vision_dir

__all__ = ["model_dir", "tokenizer", "vision_dir"]
