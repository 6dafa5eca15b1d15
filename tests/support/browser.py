"""A headless Chromium, where the machine has one: what a page is after its script ran, and how it looks."""

import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def find() -> str | None:
    """The browser's path, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def dump(url: str) -> str:
    """The page's markup after its script ran."""
    return _run("--dump-dom", url)


def shoot(url: str, file: Path, width: int, height: int, dark: bool = False) -> None:
    """Writes a picture of the page."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    _run(*scheme, f"--window-size={width},{height}", f"--screenshot={file}", url)


def _run(*arguments: str) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [find() or NAMES[0], *_ARGUMENTS, f"--user-data-dir={profile}", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
