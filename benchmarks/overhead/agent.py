"""agentrl's runner on the same work with everything on: renderer, tool calls, masks, log-probs, versions, reward, the record."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

from agentrl import ToolEnv, Trajectory, reward, tool
from agentrl.core.timeout_pool import pure
from agentrl.engine.base import Engine, SamplingParams
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Member
from agentrl.render import Renderer
from agentrl.reward import Scorer, resolve_rewards
from agentrl.rollout.env_instance import ThreadPools
from agentrl.rollout.episode import EpisodeRunner, Limits
from agentrl.rollout.failures import CauseTable
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.run.generation_gate import GenerationGate
from agentrl.run.group_player import GroupPlayer
from agentrl.schedule.pipeline import Pipeline
from agentrl.schedule.window import Pace, WindowedFifo
from agentrl.store import EpisodeWriter, exactness_violations, read_episodes
from agentrl.types import EpisodeSpec, Group, Task
from benchmarks.overhead.assets import ANSWER, CONTEXT, MODEL, SYSTEM, load, make_agent_renderer, question
from benchmarks.overhead.meter import METER

GROUP = 8
BATCH = 8
"""groups per rollout, in a window"""
_ASSETS = load()


@reward
@pure
def exact_match(trajectory: Trajectory) -> float:
    """1 for the right answer."""
    return float(trajectory.answer == trajectory.label)


NEW_DOCUMENTS = False
"""no two calls of the tool return the same text"""


def document(number: int) -> str:
    """One of 64, as the members of a group find the same passages, or one that was never seen."""
    text = _ASSETS.documents[number % len(_ASSETS.documents)]
    return f"{number}: {text}" if NEW_DOCUMENTS else text


class Search(ToolEnv):
    """A tool that takes 10 ms, and a reward."""

    rewards = (exact_match,)
    system_prompt = SYSTEM
    calls = 0

    @tool(max_concurrency=100_000)
    async def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: what to search for
        """
        METER.hit()
        Search.calls += 1
        number = Search.calls
        await asyncio.sleep(0.010)
        return document(number)


def make_runner(
    address: str, renderer: Renderer, turns: int, env: type[ToolEnv] = Search, engine: Engine | None = None
) -> EpisodeRunner:
    """Put together as a job does it; on this engine, else on a fleet of the one server at the address."""
    return EpisodeRunner(
        make_env=env,
        env_class=env,
        engine=engine or Fleet([Member(SGLangEngine(address, model_dir=MODEL, context_length=CONTEXT))]),
        renderer=renderer,
        scorer=Scorer(resolve_rewards(env.rewards)),
        pools=ThreadPools(env),
        limits=Limits(max_turns=turns + 1, max_response_tokens=CONTEXT - 4096, context_length=CONTEXT),
        sampling=SamplingParams(max_new_tokens=1024),
        seed=0,
    )


def specs(episodes: int, first: int = 0) -> list[list[EpisodeSpec]]:
    """Episodes in groups of one task each."""
    groups = []
    for start in range(first, first + episodes, GROUP):
        task = Task(str(start), question(start // GROUP), ANSWER)
        groups.append(
            [EpisodeSpec(task, start // GROUP, i) for i in range(start, min(start + GROUP, first + episodes))]
        )
    return groups


async def run(
    address: str,
    episodes: int,
    turns: int,
    concurrency: int,
    *,
    renderer: Renderer | None = None,
    record: bool = True,
    windowed: bool = False,
) -> dict[str, Any]:
    """All episodes, measured; then the record (unless there is to be none) is read and every token compared.

    `windowed`: they are played as with --schedule async, in a window and through the gate that weight updates close.
    """
    folder = Path(tempfile.mkdtemp())
    fleet = Fleet([Member(SGLangEngine(address, model_dir=MODEL, context_length=CONTEXT))])
    engine: Any = GenerationGate(fleet) if windowed else fleet
    runner = make_runner(address, renderer or make_agent_renderer(), turns, engine=engine)
    await fleet.start()
    limits = RolloutLimits(concurrency=concurrency)
    rollout = Rollout(runner, limits)
    await rollout.run(specs(1, first=1 << 20))  # warm
    writer = EpisodeWriter(folder)
    METER.start(episodes)
    if windowed:
        groups, table = await play_in_window(rollout, limits, specs(episodes), writer)
    else:
        groups, table = await rollout.run(specs(episodes))
        if record:
            await asyncio.to_thread(write_all, writer, groups)
    writer.close()
    found = METER.stop(turns)
    await fleet.close()
    runner.close()
    left = len(asyncio.all_tasks()) - 1
    trajectories = [t for g in groups for t in g.trajectories]
    checked = check(trajectories, folder, turns)
    shutil.rmtree(folder)
    return {**found, "done": len(trajectories), "causes": str(table), "tasks_left": left, **checked}


class Source:
    """Hands out groups."""

    def __init__(self, groups: list[list[EpisodeSpec]]) -> None:
        self._groups = iter(groups)

    def get_samples(self, number: int) -> list[list[EpisodeSpec]]:
        """The next groups."""
        return [next(self._groups) for _ in range(number)]


def write_all(writer: EpisodeWriter, groups: list[Group]) -> None:
    """Record the episodes of a rollout when it has ended, in a thread, as a run does (`Collector.collect`)."""
    for group in groups:
        for trajectory in group.trajectories:
            writer.write(trajectory, step=0, split="train", config="0" * 16)


async def play_in_window(
    rollout: Rollout, limits: RolloutLimits, groups: list[list[EpisodeSpec]], writer: EpisodeWriter
) -> tuple[list[Group], CauseTable]:
    """As the loop of --schedule async does, with a trainer that takes no time: twice as many groups are in flight as may run at once."""
    at_once = max(1, limits.concurrency // GROUP)
    pace = Pace(batch=min(BATCH, len(groups)), buffer=max(2 * at_once, BATCH), window=BATCH)
    player = GroupPlayer(Source(groups), rollout, limits)  # type: ignore[arg-type]
    complete, causes = [], CauseTable()
    async with Pipeline(WindowedFifo(pace, len(groups)), player.play) as pipeline:
        for step in range(len(groups) // pace.batch):
            for taken in await pipeline.take():
                del player.specs[taken.slot]
                causes.merge(taken.outcome.causes)
                for trajectory in taken.outcome.attempts:
                    schedule = {"slot": taken.slot, "staleness": taken.staleness}
                    writer.write(trajectory, step=step, split="train", schedule=schedule)
                if taken.outcome.group is not None:
                    complete.append(taken.outcome.group)
            async with pipeline.publishing():
                pass
    return complete, causes


def check(trajectories: list[Trajectory], folder: Path, turns: int) -> dict[str, Any]:
    """That all went as scripted, to the token, in memory and in the record."""
    recorded = list(read_episodes(folder))
    sampled = [[*_ASSETS.calls[(k + 1) % 10]["ids"]] for k in range(turns - 1)] + [_ASSETS.final["ids"]]
    wrong = 0
    for t in trajectories:
        spans = [list(s.ids) for g in t.segments for s in g.spans if s.log_probs is not None]
        wrong += spans != sampled or t.score != 1.0 or len(t.segments) != 1
    return {"wrong": wrong, "recorded": len(recorded), "violations": exactness_violations(recorded)}
