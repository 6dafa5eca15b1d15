"""Adapters that change gradients by hooks on parameters, which sharding replaces."""

import pytest
from peft import OSFConfig, get_peft_model

from lightning_automodel.parallel.guards.hooks_of_users import refuse_gradient_hooks
from tests.support.training import tiny_llama


def test_projections_that_would_be_lost_are_refused() -> None:
    model = get_peft_model(tiny_llama(), OSFConfig(target_modules=["q_proj"], effective_rank=4))
    with pytest.raises(ValueError, match=r"osf.*U_low has a hook .* use DDPStrategy"):
        refuse_gradient_hooks(model)
