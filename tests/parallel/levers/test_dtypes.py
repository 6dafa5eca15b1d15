"""Dtypes: of what the model returns, of the residual stream, and of matrix products under autocast."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForSeq2SeqLM, BartConfig, T5Config

from lightning_automodel import DDPConfig, DDPStrategy
from lightning_automodel.config import FSDP2Config
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.modules.structure import find_blocks
from lightning_automodel.parallel.precision.autocast import install_autocast, widen_stream
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.parallel.levers.support import token_ids
from tests.strategies.modules import TinyModule, loader, trainer
from tests.support.families import tiny_model

NARROW = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
WIDE = {**NARROW, "output_dtype": "float32"}
CASES: dict[str, dict[str, Any]] = {
    "narrow": {"mp_policy": NARROW},
    "output": {"mp_policy": WIDE},
    "stream": {"mp_policy": WIDE, "autocast_dtype": "bfloat16"},
    "stream cut": {"mp_policy": WIDE, "autocast_dtype": "bfloat16", "sequence_parallel": True},
    "stored wide": {"mp_policy": {}, "autocast_dtype": torch.bfloat16, "activation_checkpointing": "full"},
}
EXPECTED = {  # of logits, residual stream and matrix products
    "narrow": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "output": (torch.float32, torch.bfloat16, torch.bfloat16),
    "stream": (torch.float32, torch.float32, torch.bfloat16),
    "stream cut": (torch.float32, torch.float32, torch.bfloat16),
    "stored wide": (torch.bfloat16, torch.float32, torch.bfloat16),
}


class Products(TorchFunctionMode):
    """Notes the dtypes that matrix products give."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is functional.linear and not result.is_meta:  # a block's twin only notes the shapes of draws
            self.dtypes.add(result.dtype)
        return result


def dtypes() -> dict[str, Any]:
    """Runs on each rank: dtypes, and how far the loss and the gradients are from float32."""
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    exact: Any = parallelize(tiny_model("llama"), mesh).train()
    ids = token_ids()
    exact(input_ids=ids, labels=ids).loss.backward()
    found: dict[str, Any] = {}
    for name, fields in CASES.items():
        model: Any = parallelize(tiny_model("llama"), mesh, FSDP2Config(**fields)).train()
        stream: set[torch.dtype] = set()
        for layer in model.model.layers:
            layer.register_forward_hook(lambda m, a, out, seen=stream: seen.add(out.dtype))
        with Products() as products:
            logits = model(input_ids=ids).logits
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        of_both = ([to_local_if_dtensor(p.grad) for p in m.parameters()] for m in (model, exact))
        errors = [((one - other).norm() / other.norm()).item() for one, other in zip(*of_both, strict=True)]
        found[name] = ((logits.dtype, *stream, *products.dtypes), max(errors))
    return found


@pytest.mark.slow
def test_of_logits_stream_and_products(pool2: Pool) -> None:
    for found in pool2.run(dtypes):
        assert {name: seen for name, (seen, _) in found.items()} == EXPECTED
        assert all(error < 0.1 for _, error in found.values()), found
        assert found["stream"][1] < found["output"][1]  # what the wide stream is for


T5 = T5Config(vocab_size=61, d_model=24, d_kv=6, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
BART = BartConfig(
    vocab_size=61,
    d_model=24,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
)


@pytest.mark.parametrize("config", [T5, BART], ids=["t5", "bart"])
def test_of_streams_of_encoder_and_decoder(config: Any) -> None:
    model = AutoModelForSeq2SeqLM.from_config(config).bfloat16()
    install_autocast(model, torch.bfloat16, "cpu")
    widen_stream(model, torch.float32)
    seen: dict[str, set[torch.dtype]] = {}
    for name, block in find_blocks(model).items():
        seen[name] = set()
        block.register_forward_pre_hook(lambda module, args, dtypes=seen[name]: dtypes.add(args[0].dtype))
        block.register_forward_hook(lambda module, args, out, dtypes=seen[name]: dtypes.add(first_of(out).dtype))
    with Products() as products:
        model(input_ids=token_ids() % 61, decoder_input_ids=token_ids(1) % 61)
    assert [*seen.values()] == [{torch.float32}] * 2
    assert products.dtypes == {torch.bfloat16}


@pytest.mark.parametrize("config", [T5, BART], ids=["t5", "bart"])
def test_of_losses_that_models_take_of_their_logits(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    batch = {"input_ids": token_ids() % 61, "labels": token_ids(1) % 61}
    exact = model(**batch).loss.item()
    narrow = model.bfloat16()(**batch)
    assert narrow.loss.dtype == torch.bfloat16
    wide = functional.cross_entropy(narrow.logits.float().flatten(0, 1), batch["labels"].flatten())
    install_autocast(model, torch.bfloat16, "cpu")
    under = model(**batch).loss
    assert wide.dtype == under.dtype == torch.float32
    assert max(abs(wide.item() - exact), abs(under.item() - exact)) < 5e-3 * exact


def first_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


class Dtypes(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with Products() as products:
            loss = self.loss(batch)
        self.dtypes |= products.dtypes
        return loss


def of_replicas() -> set[torch.dtype]:
    """Runs on each rank."""
    module = Dtypes()
    trainer(2, DDPStrategy(DDPConfig(autocast_dtype="bfloat16"))).fit(module, loader(2))
    return module.dtypes | {parameter.dtype for parameter in module.parameters()}


def test_autocast_of_replicas(pool2: Pool) -> None:
    assert pool2.run(of_replicas, trainer=True) == [{torch.bfloat16, torch.float32}] * 2


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"autocast_dtype=torch\.float32 is not one of torch\.bfloat16"):
        FSDP2Config(autocast_dtype="float32")
    with pytest.raises(ValueError, match="'bf17' is not a dtype"):
        DDPConfig(autocast_dtype="bf17")
