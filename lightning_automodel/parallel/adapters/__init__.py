"""What models of peft do past the forward pass of the model that they hold, made right beside its shards."""

from torch import nn

from lightning_automodel.parallel.adapters.adalora import install_whole_factors
from lightning_automodel.parallel.adapters.prompts import install_reading_of_prompts


def install_peft_models(root: nn.Module) -> None:
    """Let models of peft below ``root`` call the model that they hold, and read whole tensors beside that."""
    install_reading_of_prompts(root)
    install_whole_factors(root)
