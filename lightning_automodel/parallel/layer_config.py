"""Makes the config of a layer that stands beside the models of a LightningModule, such as a head of one's own."""

from torch import nn
from transformers import PreTrainedModel

from lightning_automodel.config.switches import (
    LEVERS_OF_BLOCKS,
    SWITCHES_OF_COMPILE,
    SWITCHES_OF_LOSS,
    Config,
    with_fields,
)
from lightning_automodel.distributed.logs import log
from lightning_automodel.modules.structure import class_names, find_blocks
from lightning_automodel.plans.selection import has_rules


def config_for(module: nn.Module, config: Config, tp: int) -> Config:
    """Switch off what does not find its work in ``module``, if that is a layer, or an encoder without a plan.

    It is whole on every rank of the tp axis; what works on repeated blocks, or on the loss of a language model, is off
    where it has none.
    """
    if has_rules(module, config.tp_plan if tp > 1 else None):
        return config
    if tp > 1 and isinstance(module, PreTrainedModel):
        log(f"{class_names(module)[0]} publishes no tensor-parallel plan and stays whole on each of the {tp} tp ranks")
    whole = {"tp_plan": {name: "replicate" for name, _ in module.named_parameters()}} if tp > 1 else {}
    off = () if find_blocks(module) else (*LEVERS_OF_BLOCKS, *SWITCHES_OF_COMPILE)
    if not any(isinstance(m, PreTrainedModel) for m in module.modules()):
        off = (*off, *SWITCHES_OF_LOSS)
    return with_fields(config, whole, off)
