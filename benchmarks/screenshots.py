"""Pictures of the pages that the command writes, for docs/images; needs Chromium, and logs of `make quickstart`."""

import argparse
import sys
import tempfile
from pathlib import Path

from PIL import Image
from transformers import LlamaConfig

from lightning_automodel.cli import main as command
from tests.support import browser

IMAGES = Path(__file__).parent.parent / "docs" / "images"
COLOURS = 96
DESKTOP, PHONE = 1280, 390
LLAMA_1B = dict(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)


def main() -> None:
    """Entry point of ``python -m benchmarks.screenshots``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screenshots", description=__doc__)
    parser.add_argument("--runs", default="build/quickstart/logs", help="log directories of the report's picture")
    parser.add_argument("--only", choices=("plan", "report"), help="one of the two pages")
    arguments = parser.parse_args()
    if browser.find() is None:
        sys.exit(f"there is none of {', '.join(browser.NAMES)} on this machine")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "report":
            shoot(write_plan(Path(folder)), "plan", height=1500)
        if arguments.only != "plan":
            page = Path(folder) / "report.html"
            command(["report", arguments.runs, f"--output={page}"])
            shoot(page, "report", height=1150)


def write_plan(folder: Path) -> Path:
    """Searches for Llama-3.2-1B on 16 devices and returns the page."""
    LlamaConfig(**LLAMA_1B).save_pretrained(folder / "model")
    page = folder / "plan.html"
    command(["plan", f"--model={folder / 'model'}", "--world=16", "--seq=4096", "--search", f"--html={page}"])
    return page


def shoot(page: Path, name: str, height: int) -> None:
    """Writes a picture of a desktop, and one of a phone in the dark."""
    IMAGES.mkdir(exist_ok=True)
    for file, width, tall, dark in ((f"{name}.png", DESKTOP, height, False), (f"{name}-phone.png", PHONE, 844, True)):
        browser.shoot(f"file://{page.resolve()}", IMAGES / file, width, tall, dark)
        shrink(IMAGES / file)


def shrink(file: Path) -> None:
    """Writes a picture again with few colours, which is small."""
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(COLOURS).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
