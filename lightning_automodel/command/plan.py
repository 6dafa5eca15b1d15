"""The subcommand ``plan``: what a run needs, from its YAML file or from switches, without a GPU and without weights."""

import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import auto_cli
from torch import nn

from lightning_automodel.command.mistakes import argument_names, describe_mistake
from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed.logs import logger
from lightning_automodel.finetuning.pretrained import OF_WEIGHTS, Pretrained
from lightning_automodel.mesh import resolve_sizes
from lightning_automodel.pages import check_folder, save
from lightning_automodel.planner.hardware import Hardware, find_hardware
from lightning_automodel.planner.html import plan_page
from lightning_automodel.planner.optimizers import optimizer_of
from lightning_automodel.planner.plan import Plan, build, plan
from lightning_automodel.planner.play import Run
from lightning_automodel.planner.report import describe
from lightning_automodel.planner.run_file import FIELDS, SIZES, load, read_run, yaml_of
from lightning_automodel.planner.search import Rejected, describe_search, search


def plan_command(args: Sequence[str]) -> None:
    """Run ``lightning-automodel plan`` with these arguments: print the plan, or the layouts that were searched.

    Raises:
        ValueError: if an argument is not right, or the layout does not fit the model.
    """
    level = logger.level
    logger.setLevel("WARNING")  # the stages log what they do, once per layout
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about torch; workers of a search inherit that
            auto_cli(_plan, args=_with_prefixes(args), prog="lightning-automodel plan", exit_on_error=False)
    except ArgumentError as error:
        known = [name for name in argument_names(_plan) if name not in ("run_yaml", "switches")]
        raise ValueError(describe_mistake(str(error), ["config", *known, *sorted(FIELDS)], [])) from None
    finally:
        logger.setLevel(level)


def _with_prefixes(args: Sequence[str]) -> list[str]:
    """Accept dashes in names, and the fields of the strategy's config without the name of their group."""
    found = []
    for argument in args:
        option, equals, value = argument.partition("=")
        if option.startswith("--"):
            name = option[2:].replace("-", "_")
            name = "run_yaml" if name == "config" else name  # jsonargparse has one of its own
            name = f"switches.{name}" if name.partition(".")[0] in FIELDS else name
            argument = "--search=true" if argument == "--search" else f"--{name}{equals}{value}"
        found.append(argument)
    return found


def _plan(
    model: str | None = None,
    world: int | None = None,
    run_yaml: str | None = None,
    tp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    dp_shard: int | str | None = None,
    dp_replicate: int | None = None,
    seq: int | None = None,
    micro_batch: int | None = None,
    accumulate: int | None = None,
    precision: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
    peft: dict[str, Any] | str | None = None,
    freeze: list[str] | None = None,
    optimizer: dict[str, Any] | str | None = None,
    gpu: str = "h100",
    price: float | None = None,
    switches: dict[str, Any] | None = None,
    search: bool = False,
    write: str | None = None,
    html: str | None = None,
) -> None:
    """Say what a run of FSDP2TPStrategy needs: memory, communication, time and cost, before it is started.

    Args:
        model: name or directory of a model, or of an adapter; only configs are read.
        world: number of processes.
        run_yaml: YAML file of a run, given as --config; the other arguments replace what it says.
        tp: ranks that split each layer's matrices.
        cp: ranks that split each sequence.
        ep: ranks that share the experts of a layer.
        dp_shard: ranks that share parameters, or auto, all that the others leave: a check.
        dp_replicate: groups of ranks that each hold all shards.
        seq: tokens of a row.
        micro_batch: rows that a data rank computes at a time.
        accumulate: micro-batches of an optimizer step.
        precision: of the trainer.
        model_kwargs: of the model of a run: fields of its config (--model_kwargs.num_hidden_layers=8), where to look.
        peft: adapters, as of the model of a run: --peft.r=16 --peft.target_modules=all-linear; or a saved one's folder.
        freeze: patterns of names of what does not train, as of the model of a run.
        optimizer: of the model of a run: SGD (torch's), or --optimizer.class_path=PATH --optimizer.init_args.lr=1e-4.
        gpu: a100, h100, h200, b200 or l40s.
        price: US dollars per device and hour.
        switches: fields of FSDP2Config; each may be given as --FIELD too.
        search: try the layouts of this world, and rank those that fit by tokens per second.
        write: YAML file to write the run (with --search, the best one) to.
        html: file to write the same to as a page, with pictures.

    Raises:
        ValueError: if the model or the number of processes is missing, or something does not fit.
    """
    given = {key: value for key, value in locals().items() if value is not None}
    like = load(run_yaml) if run_yaml else {}
    read: dict[str, Any] = read_run(run_yaml, like) if run_yaml else {"switches": {}}
    told = {**read, **given, "switches": {**read["switches"], **(switches or {})}}
    if "model" not in told or "world" not in told:
        raise ValueError("plan needs --model NAME_OR_DIR and --world PROCESSES, or a --config that says both")
    if told["world"] < 1:
        raise ValueError(
            f"world={told['world']} is no number of processes; give devices x nodes of the run, at least 1"
        )
    hardware, run = find_hardware(gpu, price), _run_of(told)
    for setting, path in (("--write", write), ("--html", html)):
        if path is not None:
            _check_file(setting, path)
    built = build(told["model"], told.get("peft"), told.get("freeze", ()), told.get("model_kwargs", {}))
    fitting, others = _search(built, run, hardware) if search else ([plan(built, run, hardware)], [])
    unknown = _unknown(told)
    for one in fitting:
        one.warnings.extend([*_not_planned(told, one), *unknown])
    best = fitting[0].run if fitting else None
    if not search:
        print(describe(fitting[0]), end="")
    if html:
        found, ranked = (fitting[0] if fitting else None), (fitting if search else [])
        save(html, plan_page(found, ranked, others))
        print(f"The page is written to {html}")
    if write and best is not None:
        _write(write, yaml_of(told, best, hardware.devices, like))


def _write(path: str, run: Mapping[str, Any]) -> None:
    save(path, yaml.safe_dump(run, sort_keys=False))
    files = "" if run["data"]["init_args"].get("train_files") else " --data.train_files=..."
    print(f"The run is written to {path}: lightning-automodel fit --config={path}{files}")


def _check_file(setting: str, path: str) -> None:
    if Path(path).is_dir():
        raise ValueError(f"{setting}={path} is a folder; give the name of a file")
    check_folder(setting, Path(path).parent)


def _search(model: nn.Module, run: Run, hardware: Hardware) -> tuple[list[Plan], list[Rejected]]:
    fitting, others = search(model, run, hardware)
    print(describe_search(fitting, others), end="")
    return fitting, others


def _run_of(told: Mapping[str, Any]) -> Run:
    sizes = {name: told[name] for name in SIZES if name in told}
    return Run(
        sizes=resolve_sizes(told["world"], **sizes),
        config=FSDP2Config(**told["switches"]),
        sequence_length=told.get("seq", 2048),
        micro_batch=told.get("micro_batch", 1),
        accumulation=told.get("accumulate", 1),
        precision=told.get("precision", "bf16-mixed"),
        clips=told.get("clips", True),
        optimizer=optimizer_of(told.get("optimizer")),
    )


def _unknown(told: Mapping[str, Any]) -> list[str]:
    """Say which of ``model_kwargs`` change nothing here: misspelled fields, and what is said about reading weights."""
    config, beside = Pretrained.of(told["model"]).find_config(told.get("model_kwargs", {}))
    others = [name for name in beside if name not in OF_WEIGHTS and name != "trust_remote_code"]
    return [f"model_kwargs.{name} is no field of {type(config).__name__}, and not planned" for name in others]


def _not_planned(told: Mapping[str, Any], found: Plan) -> Iterator[str]:
    """Say what of a run the plan leaves out."""
    form = (told.get("model_kwargs") or {}).get("quantization_config")
    if form is not None and not (isinstance(form, dict) and form.get("dequantize")):  # of fewer bits once it is read
        yield "quantization_config is not planned: weights count in full here, an upper bound"
    weights = found.watched.parameters.total()
    for name in told.get("averages", ()):
        yield f"{name} is not planned: its copy of the weights takes {weights / 2**30:.2f} GiB more of each rank"
