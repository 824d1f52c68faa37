"""What the record costs: `python benchmarks/recording.py [--write]`.

CPU time of this process per turn, of the same episodes with and without the record: the runner with everything on (renderer with the whole
Qwen vocabulary, Hermes tool calls, a tool that returns about 100 tokens, 64 sampled tokens a turn, masks, log-probs, versions, a reward) over
the scripted engine, which has no transport: so the runner's own cost is at its smallest, and the record's share at its largest. Rounds with
and without alternate. What counts is the least of each, as other work on the machine only adds; beside it the median of the rounds' own
ratios. After each round the record is read back and compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from agentrl import ToolEnv, Trajectory, tool
from agentrl.engine.base import SamplingParams
from agentrl.engine.scripted import Ask, ScriptedEngine
from agentrl.episode import EpisodeRunner, Limits
from agentrl.render import Renderer
from agentrl.reward import Scorer, resolve_rewards
from agentrl.rollout import Rollout, RolloutLimits
from agentrl.store import EpisodeWriter, encode, read_episodes, to_record
from agentrl.types import FinishReason
from benchmarks.overhead.agent import document, exact_match, specs
from benchmarks.overhead.assets import SYSTEM, load, make_agent_renderer

RESULTS = Path(__file__).parent / "results" / "recording_cpu.md"
MOST_SHARE = 0.10
"""of the runner's CPU per turn"""
_ASSETS = load()


class Search(ToolEnv):
    """A tool, and a reward."""

    rewards = (exact_match,)
    system_prompt = SYSTEM

    @tool
    async def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: what to search for
        """
        return document(len(query))


def make_runner(renderer: Renderer, turns: int) -> EpisodeRunner:
    def say(ask: Ask) -> list[int]:
        last = ask.number >= turns - 1
        ids: list[int] = (_ASSETS.final if last else _ASSETS.calls[(ask.number + 1) % 10])["ids"]
        return ids

    return EpisodeRunner(
        Search,
        Search,
        ScriptedEngine(say, end_id=_ASSETS.end_id),
        renderer,
        Scorer(resolve_rewards(Search.rewards)),
        limits=Limits(max_turns=turns + 1, max_response_tokens=100_000, context_length=131_072),
        sampling=SamplingParams(max_new_tokens=1024),
        seed=0,
    )


async def measure(renderer: Renderer, episodes: int, turns: int, folder: Path | None) -> float:
    """CPU milliseconds of a turn."""
    runner = make_runner(renderer, turns)
    writer = EpisodeWriter(folder) if folder is not None else None
    kept: list[Trajectory] = []

    def heard(t: Trajectory) -> None:
        if writer is not None:
            writer.write(t, step=0, split="train", config="0" * 16)
        kept.append(t)

    started = time.process_time_ns()
    await Rollout(runner, RolloutLimits(concurrency=64)).run(specs(episodes), heard)
    spent = time.process_time_ns() - started
    runner.close()
    if not all(t.score == 1.0 and len(t.turns) == turns for t in kept):
        raise SystemExit(f"not as scripted: {kept[0].stop_reason} {kept[0].cause} after {len(kept[0].turns)} turns")
    assert all(t.turns[-1].action.finish_reason is FinishReason.STOP for t in kept)
    if writer is not None and folder is not None:
        writer.close()
        check(kept, folder)
    return spent / 1e6 / (episodes * turns)


def check(kept: list[Trajectory], folder: Path) -> None:
    read = {t.episode_id: t for t in read_episodes(folder)}
    wrong = [t.episode_id for t in kept if encode(to_record(read[t.episode_id])) != encode(to_record(t))]
    if wrong or len(read) != len(kept):
        raise SystemExit(f"{len(wrong)} of {len(kept)} episodes do not come back from the record as they were")


def compare(episodes: int, turns: int, rounds: int) -> dict[str, Any]:
    renderer = make_agent_renderer()
    found: dict[bool, list[float]] = {False: [], True: []}
    asyncio.run(measure(renderer, min(episodes, 32), turns, None))  # warm
    for number in range(2 * rounds):
        on = number % 2 == 1
        with tempfile.TemporaryDirectory() as folder:
            found[on].append(asyncio.run(measure(renderer, episodes, turns, Path(folder) if on else None)))
    off, on_ms = min(found[False]), min(found[True])
    pairs = [b / a - 1 for a, b in zip(found[False], found[True], strict=True)]
    return {
        "episodes": episodes,
        "turns": turns,
        "off_ms": off,
        "on_ms": on_ms,
        "record_ms": on_ms - off,
        "share": on_ms / off - 1,
        "median": statistics.median(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"also into {RESULTS.relative_to(RESULTS.parents[2])}")
    args = parser.parse_args()
    rows = [compare(args.episodes, turns, args.rounds) for turns in args.turns]
    if args.json:
        print(json.dumps(rows))
        return
    lines = ["| turns | CPU ms/turn without | with | the record | share | median share |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['turns']} | {r['off_ms']:.3f} | {r['on_ms']:.3f} | {r['record_ms']:.3f} | {r['share']:.1%} | {r['median']:.1%} |"
        for r in rows
    ]
    print("\n".join(lines))
    over = [r for r in rows if r["share"] > MOST_SHARE]
    print(f"the record takes {'more than' if over else 'at most'} {MOST_SHARE:.0%} of the runner's CPU per turn")
    if args.write:
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M+00:00")
        where = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
        about = f"{when}, `python benchmarks/recording.py --write`, {where}; {args.episodes} episodes, {args.rounds} rounds."
        RESULTS.write_text("\n\n".join(["# What the record costs", about, "\n".join(lines)]) + "\n")


if __name__ == "__main__":
    main()
