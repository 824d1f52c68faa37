"""Replay: the real EpisodeRunner plays recorded generations with today's renderer, parser, tools, environment and rewards, without an engine.

Members of a group are replayed together, since group rewards need all of them. Where some are missing, the group's components are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentrl.errors import Failure, RewardFailure
from agentrl.render.renderer import strip_control
from agentrl.replay.compare import Divergence, ReadOutput, compare
from agentrl.replay.playback import EXTERNAL_STOPS, Departure, PlaybackGenerator, PlaybackTools, with_playback
from agentrl.rollout.episode import Episode, EpisodeRunner
from agentrl.rollout.mixed_runner import MixedRunner
from agentrl.store.blobs import Outputs
from agentrl.types import EpisodeSpec, Provenance, Status, StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the replay of one episode."""

    episode_id: str
    divergence: Divergence | None
    partial: bool = False
    """the clock or the engine ended the recorded episode: compared up to that point"""

    def to_json(self) -> dict[str, object]:
        """JSON values, for the record of a replay."""
        return {
            "episode_id": self.episode_id,
            "partial": self.partial,
            "divergence": self.divergence and asdict(self.divergence),
        }


def spec_of(t: Trajectory) -> EpisodeSpec:
    """The spec of a recorded episode."""
    return EpisodeSpec(t.task, t.group_index, t.index, t.attempt, t.episode_id.removesuffix(f"{t.index}-{t.attempt}"))


async def replay_group(
    runner: EpisodeRunner,
    members: Sequence[Trajectory],
    live: Container[str] | None = None,
    outputs: Outputs | None = None,
) -> list[Outcome]:
    """Replay the episodes of one group, one after the other.

    Args:
        runner: a runner with the seed and temperature of the episodes; its engine is not used.
        members: the recorded episodes.
        live: names of tools to call again. None: recorded results are used. If the episode then differs and it has tools that are methods of its
            environment, which they may change, it is replayed a second time with these tools called; the replay that gets further is used.
        outputs: full outputs of tools that were saved with the record, to report where one differs.
    """
    full_outputs = _FullOutputs(runner, outputs)
    outcomes, stateful = await _replay(runner, members, [live or ()] * len(members), full_outputs)
    if live is not None or not any(o.divergence and s for o, s in zip(outcomes, stateful, strict=True)):
        return outcomes
    live_again = [s if o.divergence else () for o, s in zip(outcomes, stateful, strict=True)]
    again, _ = await _replay(runner, members, live_again, full_outputs)
    return [b if _further(b, a) else a for a, b in zip(outcomes, again, strict=True)]


async def _replay(
    runner: EpisodeRunner, members: Sequence[Trajectory], live: Sequence[Container[str]], full_output: ReadOutput
) -> tuple[list[Outcome], list[set[str]]]:
    """The outcomes, and the stateful tools that each episode called."""
    played: list[_Played] = []
    stateful: list[set[str]] = []
    for then, names in zip(members, live, strict=True):
        generator = PlaybackGenerator(then)
        tools = PlaybackTools(generator, runner.pools.tool_executor, names)
        today = await with_playback(runner, generator, tools).run(spec_of(then))
        played.append(_Played(then, today, generator.departure))
        stateful.append(tools.stateful)
    played = await _with_group_rewards(runner, played)
    return [await _outcome(runner, p, full_output) for p in played], stateful


class _FullOutputs:
    """Full outputs of tools by their hash: those saved with the record, and those of today's calls."""

    def __init__(self, runner: EpisodeRunner, recorded: Outputs | None) -> None:
        self._recorded = recorded
        self._today: dict[str, bytes] = {}
        saves = recorded is not None and recorded.folder.is_dir()
        runner.pools.tool_executor.save_output = self._today.__setitem__ if saves else None

    def __call__(self, sha256: str) -> str | None:
        if sha256 in self._today:
            return self._today[sha256].decode("utf-8", "replace")
        return self._recorded.read(sha256) if self._recorded is not None else None


def _further(a: Outcome, b: Outcome) -> bool:
    """True if `a` differs later than `b`, or not at all."""
    if a.divergence is None or b.divergence is None:
        return b.divergence is not None
    places = [(d.turn, d.segment, d.token) for d in (a.divergence, b.divergence)]
    return places[0] > places[1]


@dataclass(frozen=True, slots=True)
class _Played:
    """A recorded episode and its replay."""

    then: Trajectory
    today: Trajectory
    departure: Departure | None

    @property
    def failed(self) -> bool:
        return self.then.status in (Status.FAILED, Status.ABORTED)


async def _with_group_rewards(runner: EpisodeRunner, played: list[_Played]) -> list[_Played]:
    """Score the group as the rollout did, if it is complete; else remove the group's components on both sides."""
    if not runner.scorer.group:
        return played
    names = [r.name for r in runner.scorer.group]
    members = [p for p in played if not p.failed]
    scored_then = [any(_is_component_of(k, names) for k in p.then.rewards) for p in members]
    complete = members and all(p.departure is None for p in members) and (all(scored_then) or not any(scored_then))
    if not complete:
        return [replace(p, then=_without(p.then, names), today=_without(p.today, names)) for p in played]
    try:
        scored = iter(await runner.scorer.score_group([p.today for p in members]))
    except RewardFailure as e:
        scored = iter([replace(p.today, stop_reason=StopReason.REWARD_FAILURE, cause=e.cause) for p in members])
    return [p if p.failed else replace(p, today=next(scored)) for p in played]


def _is_component_of(component: str, names: Sequence[str]) -> bool:
    return component.partition(".")[0] in names


def _without(t: Trajectory, names: Sequence[str]) -> Trajectory:
    rewards = {k: v for k, v in t.rewards.items() if not _is_component_of(k, names)}
    return replace(t, rewards=rewards, weights={k: v for k, v in t.weights.items() if not _is_component_of(k, names)})


async def _outcome(runner: EpisodeRunner, played: _Played, full_output: ReadOutput) -> Outcome:
    then, decode = played.then, runner.renderer.tokenizer.decode
    divergence = compare(then, played.today, played.departure, decode, full_output)
    if divergence is not None and divergence.cause == "template" and divergence.turn < 0 and runner.driver is None:
        divergence = await _attribute_prompt(runner, then, divergence)
    return Outcome(then.episode_id, divergence, partial=then.stop_reason in EXTERNAL_STOPS)


async def _attribute_prompt(runner: EpisodeRunner, then: Trajectory, divergence: Divergence) -> Divergence:
    """The environment causes a different first prompt if today's texts do not occur in the recorded one, else the template does."""
    span = next((s for s in then.segments[0].spans if s.provenance is Provenance.PROMPT), None)
    text = runner.renderer.tokenizer.decode(span.ids) if span else ""
    episode = Episode(replace(runner, engine=PlaybackGenerator(then)), spec_of(then))
    try:
        await episode.open_prompt(await episode.reset())
    except Failure:
        return divergence
    finally:
        await episode.close()
    observed = [str(part).strip() for m in episode.seat.conversation for part in _texts(m["content"])]
    if not all(part in text for part in observed):
        return replace(divergence, cause="env", what="the first observation")
    if runner.renderer.format.needs_tools:
        described = [
            part
            for t in episode.instance.tools.values()
            for part in (
                t.name,
                json.dumps(t.description, ensure_ascii=False)[1:-1],
                *t.parameters.get("properties", ()),
            )
        ]
        if not all(part in text for part in described):
            return replace(divergence, cause="env", what="the tools in the first prompt")
    return divergence


def _texts(content: Any) -> list[str]:
    """The texts of a content, without images."""
    return [p.get("text", "") for p in content] if isinstance(content, (list, tuple)) else [content]


class Tally:
    """The outcomes of a replay, counted by cause and value, with one example each."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def add(self, outcomes: Iterable[Outcome]) -> None:
        self.outcomes += outcomes

    @property
    def differing(self) -> list[Outcome]:
        """Outcomes of the episodes that differ."""
        return [o for o in self.outcomes if o.divergence is not None]

    def __str__(self) -> str:
        total, differ = len(self.outcomes), self.differing
        partial = sum(o.partial for o in self.outcomes)
        note = f" ({partial} of them up to where the clock or the engine ended them)" if partial else ""
        if not differ:
            return f"{total} episodes replayed: identical{note}"
        rows: dict[tuple[str, str], list[Outcome]] = {}
        for o in differ:
            assert o.divergence is not None
            what = strip_control(" ".join(o.divergence.what.split()))  # it may hold a tool name that the policy wrote
            rows.setdefault((o.divergence.cause, what), []).append(o)
        lines = [f"{total} episodes replayed: {total - len(differ)} identical, {len(differ)} differ{note}", ""]
        lines.append(f"{'cause':<12}  {'count':>6}  {'what':<40}  first in")
        for (cause, what), outcomes in sorted(rows.items(), key=lambda kv: -len(kv[1])):
            first = outcomes[0].divergence
            assert first is not None
            place = "prompt" if first.turn < 0 else f"turn {first.turn}"
            lines.append(
                f"{cause:<12}  {len(outcomes):>6}  {what:<40.40}  {first.episode_id}, {place}, token {first.token}"
            )
        return "\n".join([*lines, "", f"first difference, episode {differ[0].episode_id}:", str(differ[0].divergence)])


RunnerFor = Callable[[str], EpisodeRunner | MixedRunner]
"""the runner of a split, with its seed and temperature"""
