"""Replay: recorded generations through today's renderer, parser, tools, environment and rewards, by the real EpisodeRunner, no engine.

Members of a group are replayed together, since group rewards need them all; where some are missing, the group's components are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from agentrl.errors import Failure, RewardFailure
from agentrl.render.renderer import strip_control
from agentrl.replay.compare import Divergence, Whole, compare
from agentrl.replay.playback import OUTSIDE, Departure, PlaybackToolExecutor, play_back
from agentrl.rollout.episode import Episode, EpisodeRunner
from agentrl.store.blobs import Outputs
from agentrl.types import EpisodeSpec, Provenance, Status, StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay of one episode showed."""

    episode_id: str
    divergence: Divergence | None
    partial: bool = False
    """the clock or the engine had ended it: compared up to there"""

    def to_json(self) -> dict[str, object]:
        """JSON values, for the record of a replay."""
        return {
            "episode_id": self.episode_id,
            "partial": self.partial,
            "divergence": self.divergence and asdict(self.divergence),
        }


def spec_of(t: Trajectory) -> EpisodeSpec:
    """The order from which a recorded episode was made."""
    return EpisodeSpec(t.task, t.group_index, t.index, t.attempt, t.episode_id.removesuffix(f"{t.index}-{t.attempt}"))


async def replay_group(
    runner: EpisodeRunner,
    members: Sequence[Trajectory],
    live: Container[str] | None = None,
    outputs: Outputs | None = None,
) -> list[Outcome]:
    """Replay the episodes of one group, one after the other.

    `live`: names of tools that are really called. None: recorded results; but an episode that then differs, and whose tools are methods of
    its environment (which they may change), is replayed once more with those called. The replay that gets further is the one that counts.

    `outputs`: of tools, whole, as they were kept with the record; where one differs, the place in it is told.

    The runner is used for nothing else: its engine and tool executor are replaced.
    """
    whole = _WholeOutputs(runner, outputs)
    outcomes, stateful = await _replay(runner, members, [live or ()] * len(members), whole)
    if live is not None or not any(o.divergence and s for o, s in zip(outcomes, stateful, strict=True)):
        return outcomes
    again, _ = await _replay(
        runner, members, [s if o.divergence else () for o, s in zip(outcomes, stateful, strict=True)], whole
    )
    return [b if _further(b, a) else a for a, b in zip(outcomes, again, strict=True)]


async def _replay(
    runner: EpisodeRunner, members: Sequence[Trajectory], live: Sequence[Container[str]], whole: Whole
) -> tuple[list[Outcome], list[set[str]]]:
    """The outcomes, and which stateful tools each episode called."""
    played: Played = []
    stateful: list[set[str]] = []
    for then, names in zip(members, live, strict=True):
        engine = play_back(runner, then, names)
        today = await runner.run(spec_of(then))
        played.append((then, today, engine.departure))
        stateful.append(cast(PlaybackToolExecutor, runner.tool_executor).stateful)
    played = await _with_group_rewards(runner, played)
    return [await _outcome(runner, *each, whole) for each in played], stateful


class _WholeOutputs:
    """Outputs of tools by their hash: those kept with the record, and those that a replay makes."""

    def __init__(self, runner: EpisodeRunner, kept: Outputs | None) -> None:
        self._kept = kept
        self._today: dict[str, bytes] = {}
        tool_executor = (
            runner.tool_executor.real
            if isinstance(runner.tool_executor, PlaybackToolExecutor)
            else runner.tool_executor
        )
        tool_executor.keep = self._today.__setitem__ if kept is not None and kept.folder.is_dir() else None

    def __call__(self, sha256: str) -> str | None:
        if sha256 in self._today:
            return self._today[sha256].decode("utf-8", "replace")
        return self._kept.read(sha256) if self._kept is not None else None


def _further(a: Outcome, b: Outcome) -> bool:
    """Does `a` differ later than `b`, or not at all?"""
    if a.divergence is None or b.divergence is None:
        return b.divergence is not None
    places = [(d.turn, d.segment, d.token) for d in (a.divergence, b.divergence)]
    return places[0] > places[1]


Played = list[tuple[Trajectory, Trajectory, Departure | None]]


async def _with_group_rewards(runner: EpisodeRunner, played: Played) -> Played:
    """Score the group as the rollout did, if it is all there; else forget the group's components on both sides."""
    if not runner.scorer.group:
        return played
    names = [r.name for r in runner.scorer.group]
    stands = [i for i, (then, _, _) in enumerate(played) if then.status not in (Status.FAILED, Status.ABORTED)]
    scored_then = [any(_belongs(k, names) for k in played[i][0].rewards) for i in stands]
    if stands and all(played[i][2] is None for i in stands) and (all(scored_then) or not any(scored_then)):
        try:
            done = await runner.scorer.score_group([played[i][1] for i in stands])
        except RewardFailure as e:
            done = [replace(played[i][1], stop_reason=StopReason.REWARD_FAILURE, cause=e.cause) for i in stands]
        out = list(played)
        for i, today in zip(stands, done, strict=True):
            out[i] = (played[i][0], today, played[i][2])
        return out
    return [(_without(then, names), _without(today, names), left) for then, today, left in played]


def _belongs(component: str, names: Sequence[str]) -> bool:
    return component.partition(".")[0] in names


def _without(t: Trajectory, names: Sequence[str]) -> Trajectory:
    rewards = {k: v for k, v in t.rewards.items() if not _belongs(k, names)}
    return replace(t, rewards=rewards, weights={k: v for k, v in t.weights.items() if not _belongs(k, names)})


async def _outcome(
    runner: EpisodeRunner, then: Trajectory, today: Trajectory, left: Departure | None, whole: Whole
) -> Outcome:
    found = compare(then, today, left, runner.renderer.tokenizer.decode, whole)
    if found is not None and found.cause == "template" and found.turn < 0:
        found = await _whose_prompt(runner, then, found)
    return Outcome(then.episode_id, found, partial=then.stop_reason in OUTSIDE)


async def _whose_prompt(runner: EpisodeRunner, then: Trajectory, found: Divergence) -> Divergence:
    """A first prompt that differs is the environment's doing if what it says today does not occur in the recorded one, else the template's."""
    span = next((s for s in then.segments[0].spans if s.provenance is Provenance.PROMPT), None)
    text = runner.renderer.tokenizer.decode(span.ids) if span else ""
    episode = Episode(runner, spec_of(then))
    try:
        await episode.reset()
    except Failure:
        return found
    finally:
        await episode.close()
    said = [str(text).strip() for m in episode.conversation for text in _texts(m["content"])]
    if not all(s in text for s in said):
        return replace(found, cause="env", what="the first observation")
    if runner.renderer.format.needs_tools:
        told = [
            s
            for t in episode.instance.tools.values()
            for s in (t.name, json.dumps(t.description, ensure_ascii=False)[1:-1], *t.parameters.get("properties", ()))
        ]
        if not all(s in text for s in told):
            return replace(found, cause="env", what="the tools in the first prompt")
    return found


def _texts(content: Any) -> list[str]:
    """A content as text, images left out."""
    return [p.get("text", "") for p in content] if isinstance(content, (list, tuple)) else [content]


class Tally:
    """Counts of a replay: by cause and value, with one example each."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Count."""
        self.outcomes += outcomes

    @property
    def differing(self) -> list[Outcome]:
        """Those that differ."""
        return [o for o in self.outcomes if o.divergence is not None]

    def __str__(self) -> str:
        total, differ = len(self.outcomes), self.differing
        partial = sum(o.partial for o in self.outcomes)
        note = f" ({partial} of them up to where the clock or the engine had ended them)" if partial else ""
        if not differ:
            return f"{total} episodes replayed: identical{note}"
        rows: dict[tuple[str, str], list[Outcome]] = {}
        for o in differ:
            assert o.divergence is not None
            what = strip_control(" ".join(o.divergence.what.split()))  # it may name a tool as the policy called it
            rows.setdefault((o.divergence.cause, what), []).append(o)
        lines = [f"{total} episodes replayed: {total - len(differ)} identical, {len(differ)} differ{note}", ""]
        lines.append(f"{'cause':<12}  {'count':>6}  {'what':<40}  first in")
        for (cause, what), found in sorted(rows.items(), key=lambda kv: -len(kv[1])):
            first = found[0].divergence
            assert first is not None
            place = "prompt" if first.turn < 0 else f"turn {first.turn}"
            lines.append(
                f"{cause:<12}  {len(found):>6}  {what:<40.40}  {first.episode_id}, {place}, token {first.token}"
            )
        return "\n".join([*lines, "", f"first difference, episode {differ[0].episode_id}:", str(differ[0].divergence)])


RunnerFor = Callable[[str], EpisodeRunner]
"""split -> a runner with its seed and temperature"""
