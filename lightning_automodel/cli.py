"""The command ``lightning-automodel``: fit, validate, test and predict from a YAML file and switches; and what
is done with what was trained: generate, evaluate, export, consolidate. Before all that: plan.
"""

import os
import re
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, NoReturn

import lightning as L
import torch
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import Callback, ProgressBar, ThroughputMonitor
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_automodel import DDPStrategy, FSDP2TPStrategy, MegatronFSDPStrategy
from lightning_automodel.callbacks import Health, Throughput, step_bar
from lightning_automodel.checkpointing.conversion import consolidate, export
from lightning_automodel.command.evaluation import evaluate
from lightning_automodel.command.inputs import refuse_missing, refuse_other_file
from lightning_automodel.command.interruption import GoOnCommand
from lightning_automodel.command.leaving import wait_for_others
from lightning_automodel.command.mistakes import argument_names, describe_mistake, squeezed
from lightning_automodel.command.plan import plan_command
from lightning_automodel.command.predictions import PredictingTrainer
from lightning_automodel.command.quiet import be_quiet
from lightning_automodel.command.report import report_command
from lightning_automodel.command.saved_config import ConfigBesideLogs
from lightning_automodel.command.text import generate
from lightning_automodel.command.writable import refuse_unwritable
from lightning_automodel.config import FSDP2Config
from lightning_automodel.config.proposals import proposal
from lightning_automodel.finetuning import CausalLM, TextDataModule

_DESCRIPTION = (
    "Trains and evaluates. Of what was trained there are also: lightning-automodel generate MODEL (text, "
    "conversations), evaluate MODEL --files=... (loss and perplexity), export CKPT OUT (Hugging Face's format) and "
    "consolidate CKPT FILE (one Lightning file); of what was logged: report RUN_DIR (a page). Before a run: plan."
)
_TOOLS: dict[str, Any] = {
    "generate": generate,
    "evaluate": evaluate,
    "export": export,
    "consolidate": consolidate,
}
_COMMANDS: dict[str, Any] = {"plan": plan_command, "report": report_command}
_OURS: dict[str, type] = {"model": CausalLM, "data": TextDataModule, "trainer.strategy": FSDP2TPStrategy}


class AutomodelCLI(LightningCLI):
    """LightningCLI with this package's model, data and strategy until others are named."""

    def __init__(self, args: Sequence[str] | None = None) -> None:
        self._words = sys.argv[1:] if args is None else list(args)
        super().__init__(
            model_class=L.LightningModule,
            datamodule_class=L.LightningDataModule,
            trainer_class=PredictingTrainer,
            seed_everything_default=0,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=ConfigBesideLogs,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            parser_kwargs={"description": _DESCRIPTION, "exit_on_error": False, "version": _versions()},
            args=None if args is None else list(args),
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Makes our classes the default of ``--model``, ``--data`` and ``--trainer.strategy``."""
        paths = {key: f"{cls.__module__}.{cls.__qualname__}" for key, cls in _OURS.items()}
        chosen: dict[str, Any] = {key: {"class_path": path} for key, path in paths.items()}
        chosen["trainer.strategy"]["init_args"] = {"config": FSDP2Config().to_dict()}  # --print_config shows all fields
        parser.set_defaults(chosen)
        parser.add_argument("--monitor", type=bool, default=True, help="add the callbacks Throughput and Health")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Ends the process with one line if an argument is not right."""
        given = sys.argv[1:] if args is None else args
        try:
            super().parse_arguments(parser, _with_torch_optimizers(given) if isinstance(given, list) else given)
        except ArgumentError as error:
            commands = [*self.subcommands(), *_TOOLS, *_COMMANDS]
            raise ValueError(describe_mistake(str(error), self._known_keys(), commands)) from None
        if (chosen := self.config.get("subcommand")) is None:
            return
        if checkpoint := self.config[chosen].get("ckpt_path"):  # LightningCLI reads it next
            refuse_other_file(checkpoint)
        if chosen == "fit":
            self._bound_run(self.config.fit.trainer)

    def _known_keys(self) -> list[str]:
        chosen = next((word for word in self._words if word in self._subcommand_parsers), "fit")
        defaults = self._subcommand_parsers[chosen].get_defaults(skip_validation=True)
        keys = {key for key in defaults.keys() if "init_args" not in key}  # noqa: SIM118 (no dict)
        ours = {f"{key}.{name}" for key, cls in _OURS.items() for name in argument_names(cls)}
        return sorted(keys | ours | set(_OURS))

    def _bound_run(self, trainer: Any) -> None:
        """Chooses one epoch where nothing ends the run: Lightning's own choice, 1000, is no run that anybody wants."""
        if trainer.max_epochs is None and trainer.max_steps == -1 and trainer.max_time is None:
            trainer.max_epochs = 1

    def instantiate_classes(self) -> None:
        """Lets a class's refusal of its arguments through; jsonargparse wraps it in a list of attempts."""
        refusals: list[ValueError] = []

        def instantiate(cls: type, *args: Any, **kwargs: Any) -> Any:
            try:
                return cls(*args, **kwargs)
            except ValueError as refusal:
                refusals.append(refusal)
                raise

        # The model and the data have instantiators of Lightning's, which come first.
        self.parser.add_instantiator(instantiate, object)
        try:
            super().instantiate_classes()
        except ValueError as error:
            candidates = [*refusals, error.__cause__, error]
            raise next((e for e in candidates if e is not None and _is_ours(e)), error) from None
        chosen = self.config.get("subcommand")
        if chosen is not None:
            refuse_missing(self.datamodule, self.config[chosen].get("ckpt_path"))
        if chosen == "fit":
            refuse_unwritable(self.trainer, self.datamodule)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Adds what a run shows, unless the configuration has it or wants none: speed, health, and a progress bar."""
        trainer = self._get(self.config_init, "trainer", default={})
        if isinstance(trainer.get("strategy"), str):
            kwargs = {"strategy": _strategy_of(trainer["strategy"]), **kwargs}
        callbacks = trainer.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        callbacks = [*callbacks, *self._shown(trainer, callbacks), GoOnCommand(self._words)]
        try:
            return super().instantiate_trainer(**{"callbacks": callbacks, **kwargs})
        except (TypeError, ValueError, ModuleNotFoundError) as error:
            if _is_of(error, "lightning."):
                raise ValueError(squeezed(str(error))) from None
            raise

    def _shown(self, trainer: Any, callbacks: list[Callback]) -> Iterator[Callback]:
        """Make what shows the run and is not among ``callbacks``; the bar last: it reads what the others log."""
        if self._get(self.config_init, "monitor", default=True):
            if not any(isinstance(callback, Throughput | ThroughputMonitor) for callback in callbacks):
                yield Throughput()
            if not any(isinstance(callback, Health) for callback in callbacks):
                yield Health()
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if trainer.get("enable_progress_bar") is not False and not has_bar:
            yield step_bar()


def _versions() -> str:
    """List what a report of a mistake should say."""
    names = ("lightning_automodel", "torch", "lightning", "transformers")
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def _with_torch_optimizers(args: list[str]) -> list[str]:
    """Take the short name of an optimizer for torch's: other packages (bitsandbytes, optimi) use the same names."""
    expanded: list[str] = []
    for argument in args:
        option, equals, name = argument.rpartition("=")
        before = option if equals else (expanded or [""])[-1]
        is_optimizer = re.fullmatch(r"--([\w.]+\.)?optimizer", before) and name in torch.optim.__all__
        expanded.append(f"{option}{equals}torch.optim.{name}" if is_optimizer else argument)
    return expanded


def _strategy_of(name: str) -> Any:
    """Resolves a strategy's name: those of this package's classes, and ``ddp``, mean ours.

    Raises:
        ValueError: for a name that nobody has registered.
    """
    ours = {cls.__name__: cls for cls in (DDPStrategy, FSDP2TPStrategy, MegatronFSDPStrategy)} | {"ddp": DDPStrategy}
    if name in ours:
        return ours[name]()
    known = ["auto", *StrategyRegistry.available_strategies()]
    if name not in known:
        hint = proposal(name, [*ours, *known]) or f"; use {', '.join(ours)} (ours), or a name of Lightning's"
        raise ValueError(f"--trainer.strategy={name}: there is no such strategy{hint}")
    return name


def run_tool(args: list[str]) -> None:
    """Runs one of the subcommands about what was trained.

    Raises:
        ValueError: if an argument is not right.
    """
    try:
        auto_cli(_TOOLS, args=args, prog="lightning-automodel", exit_on_error=False)
    except ArgumentError as error:
        raise ValueError(describe_mistake(str(error), [], _TOOLS)) from None


def _run_command(given: list[str]) -> None:
    """Runs a command that is no run, which Ctrl-C ends as it ends other programs."""
    try:
        _COMMANDS[given[0]](given[1:])
    except KeyboardInterrupt:
        sys.stderr.write(f"lightning-automodel: {given[0]} was interrupted\n")
        sys.exit(130)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command. A mistake in the configuration ends with its message and exit code 1, on every rank."""
    given = sys.argv[1:] if args is None else list(args)
    be_quiet()
    try:
        if given and given[0] in _TOOLS:
            run_tool(given)
        elif given and given[0] in _COMMANDS:
            _run_command(given)
        else:
            AutomodelCLI(args)
    except MisconfigurationException as error:
        _end(squeezed(str(error)))
    except (ValueError, OSError) as error:
        if not (_is_ours(error) or _is_of(error, "lightning.pytorch.")):  # theirs are about settings, too
            raise
        _end(squeezed(str(error)) if not _is_ours(error) else str(error))


def _end(message: str) -> NoReturn:
    """Ends this process with one line, which one process per node writes."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"lightning-automodel: error: {message}\n")
    wait_for_others()
    sys.exit(1)


def _is_ours(error: BaseException) -> bool:
    """Tells whether this package raised the error, which then says by itself what to do."""
    return _is_of(error, "lightning_automodel.")


def _is_of(error: BaseException, package: str) -> bool:
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals["__name__"].startswith(package)


if __name__ == "__main__":
    main()
