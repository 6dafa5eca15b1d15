"""A run with dropout at tp=2 equals one process's on CPU: whole values, heads, features, and rows of the sequence."""

from functools import partial

from lightning_automodel.config import FSDP2Config
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model

BOUND = 1e-5
RATES = dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout"), 0.2)
JITTER = {"router_jitter_noise": 0.2, "input_jitter_noise": 0.2}


def errors(cases: list[tuple[str, str, FSDP2Config]], schedule: Schedule) -> list[tuple[float, str]]:
    """Runs on each rank; an odd number of tokens."""
    found = []
    for family, attention, config in cases:
        build = partial(tiny_model, family, attention, **RATES, **JITTER)
        error, where = compare(build, {"tp": 2}, 2, schedule, config).largest
        found.append((error, f"{where} of {family}, {attention}, {config}"))
    return found


CASES = [
    ("phi", "eager", FSDP2Config()),
    ("phi", "sdpa", FSDP2Config(sequence_parallel=True, activation_checkpointing="submodule")),
    ("phi", "sdpa", FSDP2Config(activation_checkpointing=True)),
    ("phi", "sdpa", FSDP2Config(enable_compile=True, compile_backend="aot_eager")),  # not with a graph's own numbers
    ("mixtral", "sdpa", FSDP2Config(sequence_parallel=True)),
    ("phimoe", "eager", FSDP2Config(activation_checkpointing="submodule")),  # writes through a view of what enters
    (
        "minimax",
        "eager",
        FSDP2Config(activation_checkpointing=True),
    ),  # its residual stream is what the router writes to
    ("minimax", "sdpa", FSDP2Config(sequence_parallel=True, activation_checkpointing="submodule")),
    ("longcat_flash", "sdpa", FSDP2Config(sequence_parallel=True)),  # draws behind experts, which look at values
    ("inkling2_text", "eager", FSDP2Config()),  # a kernel that drops nothing runs beside attention that does
    ("minimax", "sdpa", FSDP2Config(enable_compile=True, compile_backend="aot_eager")),
]


def test_dropout_is_that_of_one_process(pool2: Pool) -> None:
    for found in pool2.run(errors, CASES, Schedule(steps=1, length=13)):
        assert [where for error, where in found if not error <= BOUND] == []
