"""Two nodes on one machine: network namespaces, joined by a bridge in a third."""

import os
import subprocess
from types import TracebackType

import pytest


class Network:
    """Namespaces that live as long as the context; skips the test where the system forbids them."""

    def __init__(self) -> None:
        self._prefix = f"faults{os.getpid()}"
        self._names: list[str] = []

    def __enter__(self) -> "Network":
        try:
            self._switch = self._add("switch")
            _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "br0", "up")
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        for name in self._names:
            _ip("netns", "del", name)

    def add_node(self, number: int) -> list[str]:
        """A node with the address ``10.77.0.NUMBER`` on the interface ``eth0``; returns what runs a command on it."""
        name = self._add(f"node{number}")
        port = f"port{number}"
        _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            _ip("-n", name, "link", "set", interface, "up")
        return ["ip", "netns", "exec", name]

    def cut(self, number: int) -> None:
        """Pulls the cable of a node: no packet arrives, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"port{number}", "down")

    def _add(self, name: str) -> str:
        name = f"{self._prefix}{name}"
        _ip("netns", "add", name)
        self._names.append(name)
        return name


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
