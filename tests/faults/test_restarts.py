"""``torchrun --nnodes=2 --max-restarts=3``: what is killed is started again, and goes on from the last checkpoint."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.agents import Agent, free_port, stories, wait_until
from tests.faults.chains import STEPS, Story, train
from tests.harness.pool import Pool


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Those that a test has started."""
    started: list[Agent] = []
    yield started
    for agent in started:
        agent.kill()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_worker_and_then_a_node_are_killed(pool2: Pool, tmp_path: Path, agents: list[Agent]) -> None:
    """The second node dies with its agent, and a new one takes its place."""
    (tmp_path / "whole").mkdir()
    pool2.run(train, {}, tmp_path / "whole/saved", tmp_path / "whole/journal", trainer=True)
    reference = Story.read(tmp_path / "whole/journal").losses
    endpoint = f"127.0.0.1:{free_port()}"
    agents += [Agent(tmp_path, "first", endpoint, True), Agent(tmp_path, "second", endpoint, False)]

    def reached(step: int, runs: int) -> bool:
        told = stories(tmp_path)
        return len(told) >= runs and told[-1].begun >= step

    wait_until(lambda: reached(2, runs=1), 90, agents)
    os.kill(stories(tmp_path)[-1].process, signal.SIGKILL)
    wait_until(lambda: reached(8, runs=2), 90, agents)
    agents[1].kill()
    agents.append(Agent(tmp_path, "third", endpoint, False))
    for agent in (agents[0], agents[2]):
        wait_until(lambda agent=agent: agent.process.poll() is not None, 90, agents)
        assert agent.process.returncode == 0, agent.output.read_text()[-4000:]
    told = stories(tmp_path)
    assert len(told) >= 3
    assert told[-1].ended
    saved = 0
    for story in told:
        print(f"from step {story.start} to {story.begun}")
        assert story.start is None or story.start >= saved
        assert story.losses == {step: reference[step] for step in story.losses}
        saved = max(saved, story.begun)
    assert {step for story in told for step in story.losses} == set(range(STEPS))
