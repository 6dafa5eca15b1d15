"""What most users would write by hand: a module, a data module and callbacks for fine-tuning language models."""

from lightning_automodel.finetuning.causal_lm import CausalLM
from lightning_automodel.finetuning.data import TextDataModule
from lightning_automodel.finetuning.export import HuggingFaceExport
from lightning_automodel.finetuning.image_text import ImageTextDataModule, ImageTextLM
from lightning_automodel.finetuning.preferences import PreferenceDataModule
from lightning_automodel.finetuning.schedule import WarmupCosine

__all__ = [
    "CausalLM",
    "HuggingFaceExport",
    "ImageTextDataModule",
    "ImageTextLM",
    "PreferenceDataModule",
    "TextDataModule",
    "WarmupCosine",
]
