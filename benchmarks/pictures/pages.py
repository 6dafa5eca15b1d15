"""Pictures of the pages that the command writes, for docs/images; needs Chromium, and logs of `make quickstart`."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import LlamaConfig

from lightning_automodel.cli import main as command
from tests.support import browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLOURS = 256
DESKTOP, PHONE = 1280, 390
LLAMA_8B = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
LLAMA_1B = LLAMA_8B | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True)
PLANS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "plan": (
        LLAMA_8B,
        ["--world=256", "--tp=8", "--dp-replicate=2", "--seq=8192", "--sequence-parallel=true", "--micro-batch=2"],
        1400,
    ),
    "search": (LLAMA_1B, ["--world=4", "--seq=4096", "--gpu=l40s", "--search"], 1100),
}
"""Name of the picture: the model, the arguments of the command, the height on a desktop."""


def main() -> None:
    """Entry point of ``python -m benchmarks.pictures.pages``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures.pages", description=__doc__)
    parser.add_argument("--runs", default="build/quickstart/logs", help="log directories of the report's picture")
    parser.add_argument("--only", choices=(*PLANS, "report"), help="one of the pages")
    arguments = parser.parse_args()
    if browser.find() is None:
        sys.exit(f"there is none of {', '.join(browser.NAMES)} on this machine")
    with tempfile.TemporaryDirectory() as folder:
        for name in PLANS:
            if arguments.only in (name, None):
                shoot(write_plan(Path(folder), name), name, PLANS[name][2])
        if arguments.only in ("report", None):
            page = Path(folder) / "report.html"
            command(["report", arguments.runs, f"--output={page}"])
            shoot(page, "report", 1150)


def write_plan(folder: Path, name: str) -> Path:
    """Plans, and returns the page."""
    sizes, arguments, _ = PLANS[name]
    LlamaConfig(**sizes).save_pretrained(folder / name)
    page = folder / f"{name}.html"
    command(["plan", f"--model={folder / name}", *arguments, f"--html={page}"])
    return page


def shoot(page: Path, name: str, height: int) -> None:
    """Writes a picture of a desktop, and one of a phone in the dark."""
    IMAGES.mkdir(exist_ok=True)
    for file, width, tall, dark in ((f"{name}.png", DESKTOP, height, False), (f"{name}-phone.png", PHONE, 1400, True)):
        browser.shoot(f"file://{page.resolve()}", IMAGES / file, width, tall, dark)
        shrink(IMAGES / file)


def shrink(file: Path) -> None:
    """Writes a picture again with few colours, which is small."""
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
