"""Finds what a run changes of a frozen base below adapters, which checkpoints leave out because it lies in files."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.distributed.replica_checksums import checksums
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.modules.adapted_bases import forget_files_below, names_left_out
from lightning_automodel.modules.wrappers import merged_layers


class FrozenBases:
    """Compares a checksum of each parameter that is left out with that of when the run began.

    A hook that merges adapters and begins anew (ReLoRA), or layers that trained for some epochs and are frozen again.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums = torch.empty(0, dtype=torch.int64)
        self._merged: set[str] = set()

    def note(self, module: nn.Module) -> None:
        """Take what ``module`` has now for what lies in the files. No wait for the device."""
        self._merged = set(merged_layers(module))
        self._names = sorted(names_left_out(module))
        if self._names:
            self._sums = checksums(_values(module, self._names))

    def check_unmerged(self, module: nn.Module) -> None:
        """Check that no adapter was merged since the run began.

        Raises:
            ValueError: naming a layer: who reads such a checkpoint has its adapters twice, in the base and beside it.
        """
        name = next((name for name in merged_layers(module) if name not in self._merged), None)
        if name is not None:
            raise ValueError(
                f"save_checkpoint: the adapters of {name} are merged into its weights, and a run that resumes would "
                "add them once more; call unmerge_adapter() of the PeftModel before (what on_validation_start merges, "
                "on_validation_epoch_end may unmerge: ModelCheckpoint saves behind it), or save_pretrained of what "
                "merge_and_unload() returns"
            )

    def let_changes_be_saved(self, module: nn.Module) -> None:
        """Let checkpoints hold what changed on any rank, from now on. Collective if anything is left out."""
        left_out = names_left_out(module)
        places = [i for i, name in enumerate(self._names) if name in left_out]
        if not places:
            return
        names = [self._names[i] for i in places]
        changed = (checksums(_values(module, names)) != self._sums[places]).int()
        dist.all_reduce(changed, dist.ReduceOp.MAX)
        found = [name for name, has_changed in zip(names, changed.tolist(), strict=True) if has_changed]
        if not found:
            return
        forget_files_below(module, found)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warn_once(
            f"{found[0]}{more}, frozen below adapters, changed since training began: checkpoints hold them from now on"
        )


def _values(module: nn.Module, names: list[str]) -> list[Tensor]:
    return [to_local_if_dtensor(module.get_parameter(name).detach()) for name in names]
