"""Progress inside a rollout: lines in logs, a bar on a terminal, and what they say."""

import asyncio
import sys
from types import SimpleNamespace

import pytest
from doubles import FakeGenerator

from agentrl.engine.base import SamplingParams
from agentrl.errors import EngineFailure
from agentrl.run import progress
from agentrl.run.progress import CountedGenerator, Progress


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  the condition is a plain list
            await asyncio.sleep(0)


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.001)
    return []


async def test_a_slow_rollout_shows_lines_before_its_first_episode_is_done(lines):
    async with Progress(8, "rollout 3", lines.append) as shown:
        await until(lambda: lines)
        first = "rollout 3: 0 of 8 episodes, 0 sampled tokens/s, 0 generations running, no episode done yet"
        assert lines[0] == first
        shown.episode_done()
        shown.tokens += 50
        await until(lambda: "1 of 8 episodes" in lines[-1])
        assert " left" in lines[-1]
    count = len(lines)
    await asyncio.sleep(0.01)
    assert len(lines) == count, "nothing is shown after the rollout"


async def test_a_terminal_shows_a_bar_and_no_lines(lines, monkeypatch):
    monkeypatch.setattr(progress, "BAR_INTERVAL_S", 0.001)
    written = []
    terminal = SimpleNamespace(isatty=lambda: True, write=written.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", terminal)
    async with Progress(2, "eval", lines.append) as shown:
        shown.tokens = 7
        await until(lambda: any("tokens/s" in text for text in written))
    assert lines == []


async def test_sampled_tokens_and_running_generations_are_counted(hermes):
    gate = asyncio.Event()

    async def script(request):
        await gate.wait()
        return EngineFailure("down") if request.session == "bad" else "yes"

    shown = Progress(1, "r", print)
    generator = CountedGenerator(FakeGenerator(hermes, script), shown)
    asked = [asyncio.create_task(generator.generate([1], SamplingParams(8), session=s)) for s in ("good", "bad")]
    await until(lambda: shown.running == 2)
    assert "0 sampled tokens/s, 2 generations running" in shown.line()
    gate.set()
    generation, error = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(error, EngineFailure)
    await generator.release("good")
    assert (shown.running, shown.tokens) == (0, len(generation.ids))
    assert shown.tokens > 0


@pytest.mark.parametrize(("seconds", "words"), [(5, "5 s"), (300, "5 min"), (3 * 3600, "3.0 h")])
def test_durations_in_words(seconds, words):
    assert progress._duration(seconds) == words
