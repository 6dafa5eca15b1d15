"""Quantized bases are refused before training, wherever they are built."""

from pathlib import Path

from transformers import AutoModelForCausalLM, TorchAoConfig

from lightning_automodel.testing.pool import Pool
from tests.support.training import Recorder, batches, make_trainer, tiny_llama


class Quantized(Recorder):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def configure_model(self) -> None:
        from torchao.quantization import Int8WeightOnlyConfig

        config = TorchAoConfig(Int8WeightOnlyConfig())
        self.model = AutoModelForCausalLM.from_pretrained(self.directory, quantization_config=config)


def refusals(directory: Path) -> list[str]:
    """Runs on each rank: under tp, and under dp_shard where __init__ builds."""
    built = Quantized(directory)
    built.configure_model()
    built.configure_model = lambda: None  # type: ignore[method-assign]
    found = []
    for module, sizes in ((Quantized(directory), {"tp": 2}), (built, {"dp_shard": 2})):
        try:
            make_trainer(sizes, max_steps=1).fit(module, batches(sizes.get("dp_shard", 1)))
        except ValueError as error:
            found.append(str(error))
    return found


def test_quantized_bases_are_refused(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    for found in pool2.run(refusals, tmp_path, trainer=True):
        assert len(found) == 2
        for message in found:
            assert "LlamaForCausalLM is quantized (torchao)" in message
            assert "load it without quantization_config" in message
