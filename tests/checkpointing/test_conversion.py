"""The ways out of a checkpoint: Hugging Face's format and the plain Lightning file, by command and by callback."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.checkpointing.conversion import consolidate, export
from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.checkpointing.hugging_face.models import write_pretrained
from lightning_automodel.cli import main
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import Recorder, batches, fit, make_trainer, tiny_llama, whole_parameters


def tiny_mixtral() -> MixtralForCausalLM:
    """Its experts are fused in memory and apart in files."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(num_hidden_layers=3, vocab_size=53, num_local_experts=3, num_experts_per_tok=2, **sizes)
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


def files_of(directory: Path) -> dict[str, Tensor]:
    return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


# ---- the writer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [tiny_llama, tiny_mixtral])
def test_files_are_those_of_transformers(tmp_path: Path, build: Any) -> None:
    model = build()
    model.save_pretrained(tmp_path / "theirs")
    state = model.state_dict()
    for size in ("10KB", "1GB"):
        write_pretrained(model, state.__getitem__, tmp_path / "ours", max_shard_size=size)
        ours, theirs = files_of(tmp_path / "ours"), files_of(tmp_path / "theirs")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
        for name in ("config.json", "generation_config.json"):
            assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    assert sorted(path.name for path in (tmp_path / "ours").glob("model*")) == ["model.safetensors"]


def tiny_deepseek() -> DeepseekV3ForCausalLM:
    """The bias by which it chooses experts is a buffer that it keeps in float32."""
    config = DeepseekV3Config(
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        vocab_size=53,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )
    model = DeepseekV3ForCausalLM(config)
    model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").uniform_(5, 5.01)
    return model


def tiny_t5() -> T5ForConditionalGeneration:
    """It keeps some matrices in float32 beside float16."""
    return T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=53))


@pytest.mark.parametrize("build", [tiny_llama, tiny_deepseek, tiny_t5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_narrowed_is_what_transformers_narrows(tmp_path: Path, build: Any, dtype: torch.dtype) -> None:
    model = build()
    model.save_pretrained(tmp_path / "wide")
    type(model).from_pretrained(tmp_path / "wide", dtype=dtype).save_pretrained(tmp_path / "theirs")
    write_pretrained(model, model.state_dict().__getitem__, tmp_path / "ours", dtype=dtype)
    ours, theirs = files_of(tmp_path / "ours"), files_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].equal(value), name


def test_memory_is_that_of_a_shard_and_a_block(tmp_path: Path) -> None:
    model = tiny_mixtral()
    held = 0
    peak = 0

    def release(size: int) -> None:
        nonlocal held
        held -= size

    def fetch(name: str) -> Tensor:
        nonlocal held, peak
        tensor = state[name].clone()
        weakref.finalize(tensor, release, tensor.nbytes)
        held += tensor.nbytes
        peak = max(peak, held)
        return tensor

    state = model.state_dict()
    block = sum(t.nbytes for name, t in state.items() if name.startswith("model.layers.0."))
    write_pretrained(model, fetch, tmp_path, max_shard_size=block)
    assert peak <= 2 * block < sum(t.nbytes for t in state.values())


# ---- from checkpoints ------------------------------------------------------------------------------------------------


def train(directory: Path, **arguments: Any) -> dict[str, Tensor]:
    return fit({"tp": 2, **arguments}, directory, epochs=1)[1]


def resume_plainly(path: Path, directory: Path) -> dict[str, Any]:
    module, parameters = fit({}, directory, epochs=2, resume=path)
    return {"losses": module.losses, "parameters": parameters}


@pytest.mark.slow
def test_out_of_a_folder(nursery: Nursery, pool2: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = pool2.run(train, tmp_path, trainer=True)[0]
    path = str(tmp_path / "epoch=0.ckpt")
    main(["export", path, str(tmp_path / "export"), "--max_shard_size=5KB"])
    assert "no tokenizer is written" in caplog.text
    model = LlamaForCausalLM.from_pretrained(tmp_path / "export")
    assert model.model.embed_tokens.weight is model.lm_head.weight
    assert all(torch.equal(p, trained[f"model.{name}"]) for name, p in model.named_parameters())
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 2
    main(["export", path, str(tmp_path / "half"), "--dtype=bfloat16"])
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    assert all(torch.equal(p, trained[f"model.{name}"].bfloat16()) for name, p in half.named_parameters())
    main(["consolidate", path, str(tmp_path / "one.ckpt")])
    FSDP2TPStrategy()  # from which on load_from_checkpoint takes folders
    for each in (path, tmp_path / "one.ckpt"):
        module = Recorder.load_from_checkpoint(each)
        assert all(torch.equal(p, trained[name]) for name, p in module.named_parameters())
        assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    pool1 = Pool(nursery, 1)
    runs = [pool1.run(resume_plainly, p, tmp_path / "x", trainer=True)[0] for p in (path, tmp_path / "one.ckpt")]
    assert runs[0]["losses"] == runs[1]["losses"]
    assert all(torch.equal(value, runs[1]["parameters"][name]) for name, value in runs[0]["parameters"].items())
    exported = tmp_path / "of_the_file"
    main(["export", str(tmp_path / "one.ckpt"), str(exported)])
    assert torch.equal(files_of(exported)["model.norm.weight"], trained["model.model.norm.weight"])


def test_a_checkpoint_of_plain_lightning(tmp_path: Path) -> None:
    """It does not say what it holds."""
    module = Recorder()
    saver = ModelCheckpoint(dirpath=tmp_path, filename="plain")
    run = make_trainer("auto", max_epochs=1, enable_checkpointing=True, callbacks=[saver])
    run.fit(module, batches(1))
    path = str(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="add --model_config DIRECTORY"):
        export(path, str(tmp_path / "export"))
    module.model.config.architectures = ["LlamaForCausalLM"]
    module.model.config.save_pretrained(tmp_path / "config")
    export(path, str(tmp_path / "export"), model_config=str(tmp_path / "config"))
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    trained = whole_parameters(module)
    assert all(torch.equal(p, trained[f"model.{name}"]) for name, p in loaded.named_parameters())


def test_mistakes_are_one_line(pool2: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool2.run(train, tmp_path, save_distributed_checkpoint=False, trainer=True)
    path = tmp_path / "epoch=0.ckpt"
    content = torch.load(path)
    del content["state_dict"]["model.model.norm.weight"]
    torch.save(content, tmp_path / "partial.ckpt")
    cases = {
        ("export", tmp_path / "none.ckpt", tmp_path / "a"): "there is no checkpoint at",
        ("export", path, tmp_path / "a", "--dtype=int8"): "no floating-point dtype",
        ("export", path, tmp_path / "a", "--max_shard_size=2XB"): "is not a size",
        ("export", path, tmp_path / "a", "--model=other"): "holds no model 'other'; it holds 'model'",
        ("export", path, tmp_path / "a", "--tokenizer=/nowhere/at/all"): "cannot be loaded",
        ("export", tmp_path / "partial.ckpt", tmp_path / "a"): "lacks 1 of 20 weights of LlamaForCausalLM",
        ("consolidate", path, tmp_path): "is a folder",
    }
    for arguments, message in cases.items():
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        assert caught.value.code == 1
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


def test_what_a_folder_says_of_its_model(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(train, tmp_path, trainer=True)
    consolidate(str(tmp_path / "epoch=0.ckpt"), str(tmp_path / "one.ckpt"))
    for path in (tmp_path / "epoch=0.ckpt", tmp_path / "one.ckpt"):
        [found] = read_checkpoint(Location.of(path))["hugging_face_models"]
        assert (found["name"], found["architecture"]) == ("model", "LlamaForCausalLM")


# ---- what other tools wrote ------------------------------------------------------------------------------------------


def written_elsewhere(tmp_path: Path, tied: bool, **models: LlamaForCausalLM) -> tuple[str, str]:
    """A file that says of no model what it is, and a directory with the config."""
    state = {f"{name}.{key}": value for name, model in models.items() for key, value in model.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "plain.ckpt")
    config = tiny_llama(tied).config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "config")
    return str(tmp_path / "plain.ckpt"), str(tmp_path / "config")


def other_llama() -> LlamaForCausalLM:
    model = tiny_llama(tied=False)
    torch.nn.init.ones_(model.lm_head.weight)
    return model


def test_one_of_several_models_is_chosen_by_name(tmp_path: Path) -> None:
    """The name of the frozen reference is the shorter one, and it was exported."""
    student = other_llama()
    path, config = written_elsewhere(tmp_path, tied=False, ref=tiny_llama(tied=False), student=student)
    with pytest.raises(ValueError, match=r"several LlamaForCausalLM, 'ref', 'student'; choose one with --model"):
        export(path, str(tmp_path / "out"), model_config=config)
    with pytest.raises(ValueError, match="holds no LlamaForCausalLM 'teacher'; it holds 'ref', 'student'"):
        export(path, str(tmp_path / "out"), model_config=config, model="teacher")
    export(path, str(tmp_path / "out"), model_config=config, model="student")
    assert torch.equal(files_of(tmp_path / "out")["lm_head.weight"], student.lm_head.weight)


def test_a_tie_that_other_tools_broke_stays_broken(tmp_path: Path) -> None:
    path, config = written_elsewhere(tmp_path, tied=True, model=other_llama())
    export(path, str(tmp_path / "out"), model_config=config)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, other_llama().get_parameter(name)) for name, p in loaded.named_parameters())
    assert len(dict(loaded.named_parameters())) == len(dict(other_llama().named_parameters()))
