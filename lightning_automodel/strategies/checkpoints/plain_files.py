"""Writes plain checkpoint files so that they appear under their names when they are complete.

Lightning writes to the system's temporary folder and moves the file, which copies it where that is another disk: a
process that dies meanwhile, or a disk that is full, leaves a part under the name of the checkpoint.
"""

from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_automodel.checkpointing.files.staging import Staging
from lightning_automodel.checkpointing.files.storage import Location


class StagedCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but that local files are written beside their place and renamed."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        target = Location.of(path)
        if not target.is_local:  # object stores show what is uploaded when all of it is
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        staging = Staging(target)
        try:
            staging.begin()
            file = staging.folder / target.name
            with file.named_in_errors():
                super().save_checkpoint(checkpoint, file.path, storage_options)
            staging.publish_file(file)
        finally:
            staging.abandon()
