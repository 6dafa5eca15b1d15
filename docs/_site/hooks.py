"""What mkdocs does beside building pages: links that leave the folder are shown as names of files."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[(`?)([^\]`]+)\1\]\((?:\.\./)+([^)]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Write `examples/vision.yaml` in the place of a link to it, which works in a checkout only."""
    return _OUTSIDE.sub(lambda found: found[0] if found[3].endswith(".md") else f"`{found[3]}`", markdown)
