"""Context parallelism beside what else a run does: generation, several models, random numbers, compilation."""

import copy
import inspect
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForTokenClassification

from lightning_automodel import DDPStrategy, FSDP2Config, MegatronFSDPStrategy
from lightning_automodel.distributed import logs
from lightning_automodel.distributed.random_numbers import RandomNumbers
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.draws.passes import draw_from, random_numbers_of
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Batch, Schedule, batches, compare
from tests.support.families import tiny_config, tiny_model
from tests.support.marks import with_long
from tests.support.training import whole


def make(family: str = "llama", **fields: object) -> tuple[nn.Module, nn.Module]:
    reference = tiny_model(family, **({"sliding_window": 4} if family == "gemma3_text" else {}))
    mesh = build_mesh(resolve_sizes(2, cp=2), "cpu")
    return reference, parallelize(copy.deepcopy(reference), mesh, FSDP2Config(**fields))  # type: ignore[arg-type]


def draw(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 100, (2, length), generator=generator) for length in lengths]


def evaluation_and_generation() -> None:
    """Calls with a cache run whole; without one, no cache of single rows is returned."""
    (ids,) = draw(13)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    outcomes = []
    reference, model = make("gemma3_text")
    cache = "cache" if "cache" in inspect.signature(type(reference).forward).parameters else "past_key_values"
    assert getattr(model.eval()(input_ids=ids), cache) is None
    for one in (reference.eval(), model):
        with torch.no_grad():
            logits = one(input_ids=ids, attention_mask=mask).logits
            kept = one(input_ids=ids, attention_mask=mask, use_cache=True)[cache]
            longer = torch.cat([mask, mask[:, -1:]], 1)
            following = one(input_ids=ids[:, :1], attention_mask=longer, **{cache: kept}).logits
        prompt = {"max_new_tokens": 4, "do_sample": False}
        outcomes.append((logits, following, one.generate(input_ids=ids, attention_mask=mask, **prompt)))
    for expected, actual in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected)


def several_passes() -> None:
    """Two forward passes of different lengths before one backward pass, with recomputation, beside another model."""
    long, short = draw(19, 12)
    reference, model = make(activation_checkpointing=True)
    other, plain = make("qwen3")[1].train(), tiny_model("llama")
    gradients = []
    for one in (reference.train(), model.train()):
        first = one(input_ids=long, labels=long).loss
        other(input_ids=short, labels=short).loss.backward()
        expected = plain(input_ids=short).logits
        second = one(input_ids=short, labels=short).loss
        (first + 2 * second).backward()
        assert plain(input_ids=short).logits.equal(expected)
        gradients.append({name: whole(p.grad) for name, p in one.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_evaluation_generation_and_several_passes(pool2: Pool) -> None:
    pool2.run(evaluation_and_generation)
    pool2.run(several_passes)


def draws() -> tuple[list[float], list[float]]:
    """Runs on each rank: what is drawn where the stream is cut, and where it is whole."""
    _, model = make()
    of_rows: list[float] = []
    of_whole: list[float] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: of_rows.append(float(torch.rand(()))))
    for part in (model.model.embed_tokens, model.model.norm):
        part.register_forward_pre_hook(lambda *_: of_whole.append(float(torch.rand(()))))
    (ids,) = draw(12)
    model.train()(input_ids=ids, labels=ids)
    return of_rows, of_whole


def test_rows_draw_other_numbers_and_whole_values_the_same(pool2: Pool) -> None:
    (rows_0, whole_0), (rows_1, whole_1) = pool2.run(draws)
    assert whole_0 == whole_1
    assert len({*rows_0, *rows_1}) == 4


def error_of_draws_behind_blocks() -> float:
    """Runs on each rank: of gradients, where blocks draw nothing and what is behind them does."""
    config = tiny_config("llama")
    config.classifier_dropout = 0.5
    torch.manual_seed(0)
    reference = LlamaForTokenClassification(config).train()
    mesh = build_mesh(resolve_sizes(2, cp=2), "cpu")
    model = parallelize(copy.deepcopy(reference), mesh)
    draw_from(reference, RandomNumbers(seed=random_numbers_of(model).seed))
    (ids,) = draw(13)
    gradients = []
    for one in (reference, model.train()):
        one(input_ids=ids, labels=ids % 2).loss.backward()
        gradients.append({name: whole(p.grad) for name, p in one.named_parameters()})
    return max(float((gradients[1][n] - g).norm() / g.norm()) for n, g in gradients[0].items())


def test_what_is_drawn_behind_blocks_without_draws_is_what_one_process_draws(pool2: Pool) -> None:
    assert max(pool2.run(error_of_draws_behind_blocks)) < 5e-5


def errors_of_skipped_blocks() -> list[float]:
    """Runs on each rank: of gradients, where blocks are left out at random, the first one and the last one too."""
    reference = tiny_model("opt", "sdpa", num_hidden_layers=3, layerdrop=0.5).train()
    model = parallelize(copy.deepcopy(reference), build_mesh(resolve_sizes(2, cp=2), "cpu")).train()
    (ids,) = draw(13)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    errors = []
    for seed in range(8):
        gradients = []
        for one in (reference, model):
            one.zero_grad()
            draw_from(one, RandomNumbers(seed=seed))
            one(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
            gradients.append({name: whole(p.grad) for name, p in one.named_parameters() if p.grad is not None})
        noise = 1e-6 * max(g.norm() for g in gradients[0].values())
        errors += [
            float((gradients[1][name] - g).norm() / g.norm()) for name, g in gradients[0].items() if g.norm() > noise
        ]
    return errors


def test_blocks_that_are_left_out(pool2: Pool) -> None:
    assert max(max(errors) for errors in pool2.run(errors_of_skipped_blocks, timeout=60)) < 5e-5


def jittered(recomputed: bool) -> dict[str, Tensor]:
    """Runs on each rank: gradients of blocks whose forward pass writes into what it is given, and is watched for it."""
    reference = tiny_model("mixtral", "sdpa", router_jitter_noise=0.1, attention_dropout=0.2)
    config = FSDP2Config(activation_checkpointing=recomputed)
    model = parallelize(reference, build_mesh(resolve_sizes(2, cp=2), "cpu"), config).train()
    draw_from(model, RandomNumbers(seed=5))
    (ids,) = draw(12)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def test_blocks_that_are_watched_are_recomputed(pool2: Pool) -> None:
    for found, expected in zip(pool2.run(jittered, True), pool2.run(jittered, False), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def compiled_error(exchange: str) -> tuple[float, str]:
    """Runs on each rank."""
    config = FSDP2Config(enable_compile=True, compile_backend="aot_eager", cp_exchange=exchange)
    return compare(lambda: tiny_model("llama"), {"cp": 2}, 2, Schedule(steps=1, clip=None), config).largest


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["gather", "all_to_all"])
def test_compiled_blocks(exchange: str, pool2: Pool) -> None:
    for error, name in pool2.run(compiled_error, exchange, timeout=240):
        assert error < 5e-5, name


def of_lengths(schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
    return batches(replace(schedule, length=(12, 14)[step]), step, data_rank)


def error_of_one_graph(exchange: str) -> tuple[float, str]:
    """Runs on each rank: blocks that are checkpointed are one graph, and the second length makes it one for all."""
    config = FSDP2Config(
        enable_compile=True, compile_backend="aot_eager", activation_checkpointing=True, cp_exchange=exchange
    )
    build = partial(tiny_model, "llama", "sdpa", num_hidden_layers=1)
    return compare(build, {"cp": 2}, 2, Schedule(steps=2, micro_batches=1), config, draw=of_lengths).largest


@pytest.mark.slow
@pytest.mark.parametrize("exchange", with_long(["gather", "all_to_all"], "all_to_all"))
def test_compiled_and_recomputed_blocks(exchange: str, pool2: Pool) -> None:
    for error, name in pool2.run(error_of_one_graph, exchange, timeout=120):
        assert error < 5e-5, name


def warnings_of(family: str) -> list[str]:
    """Runs on each rank."""
    logs._seen.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(family)
    return [str(w.message) for w in caught if "cp=2" in str(w.message)]


def test_what_gains_nothing_is_named(pool2: Pool) -> None:
    assert pool2.run(warnings_of, "llama") == [[], []]
    (message,), _ = pool2.run(warnings_of, "lfm2_moe")
    assert "Lfm2MoeShortConv of Lfm2MoeForCausalLM see the whole sequence" in message
    (message,), _ = pool2.run(warnings_of, "florence2")
    assert "cp=2 saves nothing for Florence2ForConditionalGeneration" in message


def hooked() -> list[str]:
    """Runs on each rank."""
    model = tiny_model("llama")
    for part in (model.model.embed_tokens, model.model.norm, model.model.layers[0].mlp):
        part.register_forward_hook(lambda module, args, output: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, build_mesh(resolve_sizes(2, cp=2), "cpu"))
    return [str(w.message) for w in caught if "hook of yours" in str(w.message)]


def test_hooks_that_see_rows_are_named(pool2: Pool) -> None:
    (message,), _ = pool2.run(hooked)
    assert message.startswith("model.layers.0.mlp and 1 more: a forward hook of yours will see a rank's part")


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="cp=2"):
        DDPStrategy(cp=2)
    with pytest.raises(ValueError, match="cp=2"):
        MegatronFSDPStrategy(cp=2)
    with pytest.raises(ValueError, match="cp_exchange='ring' is not one of auto, gather, all_to_all"):
        FSDP2Config(cp_exchange="ring")
