"""Checkpoints on an object store: two ranks write to, and read from, a local server that speaks S3."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from lightning_automodel.checkpointing.files.integrity import verify
from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.testing.pool import Pool
from tests.support.marks import with_long
from tests.support.training import fit

PLAIN = {"save_distributed_checkpoint": False}


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """The environment in which ``s3://bucket`` is on the server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        Location.of("s3://bucket").files.mkdir("bucket")
        yield environment
    server.stop()


def train(environment: dict[str, str], arguments: dict[str, Any], folder: str, resume: str | None) -> list[float]:
    os.environ.update(environment)
    return fit({"tp": 2, **arguments}, folder, epochs=2, resume=resume)[0].losses


@pytest.mark.slow
@pytest.mark.parametrize("arguments", with_long([{"async_save": True}, PLAIN], PLAIN), ids=str)
def test_an_object_store(pool2: Pool, store: dict[str, str], arguments: dict[str, Any]) -> None:
    folder = f"s3://bucket/{next(iter(arguments))}"
    whole = pool2.run(train, store, arguments, folder, None, trainer=True)[0]
    assert Location.of(folder).names() == ["epoch=0.ckpt", "epoch=1.ckpt"]
    again = pool2.run(train, store, arguments, f"{folder}/again", f"{folder}/epoch=0.ckpt", trainer=True)[0]
    assert again == whole[len(whole) // 2 :]
    path = Location.of(f"{folder}/epoch=1.ckpt")
    verify(path)
    weights = read_checkpoint(path)["state_dict"]
    if path.is_folder():
        part = next(path / name for name in path.names() if name.endswith(".distcp"))
        part.write(part.read()[:-1])
        with pytest.raises(ValueError, match="is damaged"):
            verify(path)
    assert "model.lm_head.weight" in weights
