"""What a device does in a step: which kernels take the time, and when it waits for the host."""

from collections.abc import Iterable
from typing import Any

import torch

KERNELS, GAPS = 40, 15


def read_profile(profile: torch.profiler.profile) -> dict[str, list[list[Any]]]:
    """Read ``kernels``, [milliseconds, how often, name], and ``gaps``, [milliseconds, when, what ran next].

    The longest of each come first; the last line of both is of all.
    """
    spent = [(event.self_device_time_total, event) for event in profile.key_averages() if is_kernel(event)]
    spent.sort(key=lambda pair: -pair[0])
    kernels = [[round(micro / 1e3, 3), event.count, event.key[:120]] for micro, event in spent[:KERNELS]]
    kernels.append([round(sum(micro for micro, _ in spent) / 1e3, 3), len(spent), "all"])
    return {"kernels": kernels, "gaps": find_gaps(profile.events() or [])}


def is_kernel(event: Any) -> bool:
    """Tell what ran on the device from the operation that asked for it, to which its time is added too."""
    return event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation


def find_gaps(events: Iterable[Any]) -> list[list[Any]]:
    """Find when the device had nothing to do: the longest, in milliseconds, when each began, and what ran next."""
    kernels = sorted(
        ((event.time_range.start, event.time_range.end, event.name) for event in events if is_kernel(event)),
        key=lambda kernel: kernel[0],
    )
    found: list[list[Any]] = []
    begin = end = kernels[0][0] if kernels else 0
    for start, stop, name in kernels:
        if start > end:
            found.append([round((start - end) / 1e3, 3), round((end - begin) / 1e3, 1), name[:80]])
        end = max(end, stop)
    idle = round(sum(gap for gap, *_ in found), 3)
    return [*sorted(found, reverse=True)[:GAPS], [idle, round((end - begin) / 1e3, 1), "all"]]
