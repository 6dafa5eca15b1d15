"""``torchrun --nnodes=2 --max-restarts=3``: what is killed is started again, and goes on from the last checkpoint."""

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from lightning_automodel.testing.pool import Pool
from tests.faults.agents import Agent, Node, free_port, stories, wait_until
from tests.faults.chains import STEPS, Story, train
from tests.faults.network import Network

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Those that a test has started."""
    started: list[Agent] = []
    yield started
    for agent in started:
        agent.kill()


def reached(directory: Path, step: int, runs: int) -> bool:
    told = stories(directory)
    return len(told) >= runs and told[-1].begun >= step


@pytest.mark.parametrize("apart", [False, True], ids=["on one network", "on nodes of their own"])
def test_a_worker_and_then_a_node_are_killed(pool2: Pool, tmp_path: Path, agents: list[Agent], apart: bool) -> None:
    """The second node dies with its agent, and a new one takes its place."""
    with Network() if apart else nullcontext() as network:
        nodes = [on(network, number) for number in (1, 2, 3)]
        endpoint = f"{nodes[0].address}:{free_port()}"
        agents += [Agent(tmp_path, "1", endpoint, nodes[0], hosts=True), Agent(tmp_path, "2", endpoint, nodes[1])]
        wait_until(lambda: reached(tmp_path, 2, runs=1), 90, agents)
        os.kill(stories(tmp_path)[-1].process, signal.SIGKILL)
        wait_until(lambda: reached(tmp_path, 8, runs=2), 90, agents)
        agents[1].kill()
        agents.append(Agent(tmp_path, "3", endpoint, nodes[2]))
        for agent in (agents[0], agents[2]):
            wait_until(lambda agent=agent: agent.process.poll() is not None, 90, agents)
            assert agent.process.returncode == 0, agent.output.read_text()[-4000:]
    judge(stories(tmp_path), reference(pool2, tmp_path / "whole"))


def test_a_link_is_cut(tmp_path: Path, agents: list[Agent]) -> None:
    """Nothing is closed and nobody is told: both sides learn it from the timeout, and say whom they miss."""
    with Network() as network:
        nodes = [on(network, number) for number in (1, 2)]
        arguments = {"endpoint": f"{nodes[0].address}:{free_port()}", "restarts": 0, "timeout": 6}
        agents += [
            Agent(tmp_path, "1", node=nodes[0], hosts=True, **arguments),
            Agent(tmp_path, "2", node=nodes[1], **arguments),
        ]
        wait_until(lambda: reached(tmp_path, 2, runs=1), 90, agents)
        network.cut(2)
        for agent, missed in ((agents[0], 1), (agents[1], 0)):
            wait_until(lambda agent=agent, missed=missed: names(agent, missed), 60, agents)


def names(agent: Agent, rank: int) -> bool:
    """Whether the error of its worker names the rank and a collective."""
    text = agent.output.read_text()
    errors = [line for line in text.splitlines() if "RuntimeError" in line and " over ranks 0, 1 " in line]
    return any(f"rank {rank} (process" in line and "gone" in line for line in errors)


def on(network: Network | None, number: int) -> Node:
    if network is None:
        return Node()
    return Node(f"10.77.0.{number}", tuple(network.add_node(number)), "eth0")


def reference(pool: Pool, directory: Path) -> dict[int, str]:
    directory.mkdir()
    pool.run(train, {}, directory / "saved", directory / "journal", trainer=True)
    return Story.read(directory / "journal").losses


def judge(told: list[Story], losses: dict[int, str]) -> None:
    """All steps have the losses of the run that was not disturbed, and none is done again that was saved."""
    assert len(told) >= 3
    assert told[-1].ended
    saved = 0
    for story in told:
        assert story.start is None or story.start >= saved
        assert story.losses == {step: losses[step] for step in story.losses}
        saved = max(saved, story.begun)
    assert {step for story in told for step in story.losses} == set(range(STEPS))
