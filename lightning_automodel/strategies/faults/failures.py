"""Reads an error of torch.distributed: whether it is one, and which collective over which ranks it comes from."""

import re
from collections.abc import Iterator
from traceback import walk_tb

import torch.distributed as dist
from torch.distributed import ProcessGroup

_BACKENDS = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out", re.IGNORECASE)


def is_of_backend(error: BaseException) -> bool:
    """Tells whether a backend of torch.distributed, or the store, has raised ``error`` or what it was raised from."""
    return any(
        isinstance(link, dist.DistError) or (isinstance(link, RuntimeError) and _BACKENDS.search(str(link)) is not None)
        for link in _chain(error)
    )


def describe_collective(error: BaseException) -> str:
    """Names the collective in which ``error`` was raised, and its ranks, as far as the stack shows them."""
    for link in reversed(list(_chain(error))):
        for frame, _ in reversed(list(walk_tb(link.__traceback__))):
            for value in frame.f_locals.values():
                if isinstance(value, ProcessGroup):
                    ranks = ", ".join(str(rank) for rank in dist.get_process_group_ranks(value))
                    return f"{frame.f_code.co_name} over ranks {ranks} ({value.group_desc})"
    return "a collective"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, the one that it was raised from, and so on."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
