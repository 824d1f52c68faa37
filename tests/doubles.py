"""Test doubles: a generator and an engine that follow a script, hand-made spans and trajectories, and a runner."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from agentrl.core.sequences import ids_checksum
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.engine.base import EngineInfo, Generation, SamplingParams, WeightsManifest
from agentrl.env import Env
from agentrl.render import Renderer
from agentrl.reward import Scorer, resolve_rewards
from agentrl.rollout.env_instance import ThreadPools
from agentrl.rollout.episode import EpisodeRunner, Limits
from agentrl.types import (
    EpisodeSpec,
    FinishReason,
    Group,
    Provenance,
    Segment,
    Span,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

EMBEDDED = Path(__file__).parents[1] / "agentrl/assets/search_r1_3m"


def weights(folder: Path) -> WeightsManifest:
    """Those of the embedded model, in a folder of their own."""
    folder.mkdir()
    shutil.copy(EMBEDDED / "model.safetensors", folder)
    return WeightsManifest(folder, fingerprint(folder))


PARIS = Task("paris", "What is the capital of France?", "Paris")
SAMPLED, OBSERVATION, PROMPT = Provenance.SAMPLED, Provenance.OBSERVATION, Provenance.PROMPT


@dataclass
class Request:
    """What an engine was asked."""

    ids: tuple[int, ...]
    sampling: SamplingParams
    session: str
    turn: int
    """how many generations this session had before"""

    @property
    def random(self) -> Random:
        return Random(self.sampling.seed)


Reply = str | Sequence[int] | Generation | Exception
Script = Callable[[Request], Any]


@dataclass
class FakeGenerator:
    """Says what `script` answers: a text (encoded, ended by the end token unless it ends with a stop string; cut by length),
    ids, a Generation, or an exception to raise. A list is a script by turn; the last entry repeats."""

    renderer: Renderer
    script: Script | Sequence[Reply]
    version: int = 3
    requests: list[Request] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    running: int = 0
    most_running: int = 0

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[Any] = ()
    ) -> Generation:
        request = Request(tuple(ids), sampling, session, self.turns.get(session, 0))
        self.turns[session] = request.turn + 1
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            reply = (
                self.script(request) if callable(self.script) else self.script[min(request.turn, len(self.script) - 1)]
            )
            return self.answer(request, await reply if inspect.isawaitable(reply) else reply)
        finally:
            self.running -= 1

    def answer(self, request: Request, reply: Reply) -> Generation:
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Generation):
            return replace(reply, context_crc=ids_checksum(request.ids))
        end: list[int] = []
        if isinstance(reply, str):
            end = [] if reply.endswith(tuple(request.sampling.stop) or ("\0",)) else [self.renderer.end_id]
            reply = self.renderer.tokenizer.encode(reply)
        whole = (*reply, *end)
        kept = whole[: request.sampling.max_new_tokens]
        reason = FinishReason.STOP if len(kept) == len(whole) else FinishReason.LENGTH
        log_probs = tuple(log_prob(t, i) for i, t in enumerate(kept))
        crc = ids_checksum(request.ids)
        return Generation(kept, log_probs, reason, policy_version=self.version, context_crc=crc)

    async def release(self, session: str) -> None:
        self.released.append(session)


class FakeEngine(FakeGenerator):
    """The generator as a whole engine, for tests of runs."""

    async def start(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self, session: str | None = None) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def close(self) -> None: ...

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        self.version = policy_version

    async def health(self) -> EngineInfo:
        return EngineInfo("fake", "0", self.version, 1 << 20, True)


def log_prob(token: int, position: int) -> float:
    """Some number that differs from token to token."""
    return -((token * 31 + position * 7) % 97 + 1) / 64


async def settled(value: Any) -> Any:
    """What a method of an Env gives, sync or async."""
    return await value if inspect.isawaitable(value) else value


async def until(condition: Callable[[], Any], within_s: float = 60) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def call(name: str, **arguments: Any) -> str:
    """A Hermes tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_runner(
    env: type[Env],
    engine: Any,
    renderer: Renderer,
    *,
    rewards: Sequence[Any] = (),
    seed: int = 0,
    temperature: float = 1.0,
    env_args: dict[str, Any] | None = None,
    driver: Any = None,
    players: dict[str, Any] | None = None,
    **limits: Any,
) -> EpisodeRunner:
    """`engine` may be a script."""
    engine = engine if hasattr(engine, "generate") else FakeGenerator(renderer, engine)
    return EpisodeRunner(
        make_env=functools.partial(env, **(env_args or {})),
        env_class=env,
        engine=engine,
        renderer=renderer,
        scorer=Scorer(resolve_rewards(rewards)),
        limits=Limits(**{"context_length": 4096, "max_response_tokens": 2048, **limits}),
        sampling=SamplingParams(max_new_tokens=1, temperature=temperature),
        seed=seed,
        pools=ThreadPools(env),
        driver=driver,
        players=players or {},
    )


async def play(env: type[Env], engine: Any, renderer: Renderer, *, task: Task = PARIS, **more: Any) -> Trajectory:
    """One episode."""
    runner = make_runner(env, engine, renderer, **more)
    try:
        return await runner.run(EpisodeSpec(task, 0, 0))
    finally:
        end(runner)


def end(runner: EpisodeRunner) -> None:
    """End the threads and processes of a runner."""
    runner.close()
    runner.pools.end_processes()
    runner.scorer.close()


def groups_of(tasks: int, members: int) -> list[list[EpisodeSpec]]:
    """Groups of episodes as a data source issues them."""
    named = [Task(f"t{g}", f"question {g}?", str(g)) for g in range(tasks)]
    return [[EpisodeSpec(t, g, g * members + i) for i in range(members)] for g, t in enumerate(named)]


def span(provenance: Provenance, ids: Sequence[int], turn: int = 0, version: int = 1, temperature: float = 1.0) -> Span:
    """A span with made-up log-probs where it is sampled."""
    if provenance is not SAMPLED:
        return Span(provenance, tuple(ids), turn)
    return Span(provenance, tuple(ids), turn, tuple(log_prob(t, i) for i, t in enumerate(ids)), version, temperature)


def trajectory(
    segments: Sequence[Sequence[Span]] = (),
    *,
    index: int = 0,
    group: int = 0,
    reason: StopReason = StopReason.TERMINATED,
    score: float | None = None,
    turns: Sequence[Turn] = (),
    **more: Any,
) -> Trajectory:
    """A trajectory by hand; without segments one of four tokens, the last two sampled."""
    segments = segments or [[span(PROMPT, (1, 2), -1), span(SAMPLED, (3, 4))]]
    return Trajectory(
        episode_id=f"{index}-0",
        group_index=group,
        index=index,
        attempt=0,
        task=PARIS,
        env="test",
        segments=tuple(Segment(tuple(s)) for s in segments),
        turns=tuple(turns),
        stop_reason=reason,
        rewards={} if score is None else {"r": score},
        weights={} if score is None else {"r": 1.0},
        **more,
    )


def group_of(*scores: float, index: int = 0, reasons: Sequence[StopReason] = ()) -> Group:
    """A group with these scores."""
    reasons = reasons or [StopReason.TERMINATED] * len(scores)
    members = [
        trajectory(index=index * 100 + i, group=index, score=s, reason=r)
        for i, (s, r) in enumerate(zip(scores, reasons, strict=True))
    ]
    return Group(index, PARIS, tuple(members))
