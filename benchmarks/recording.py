"""The cost of recording episodes: `python benchmarks/recording.py [--write]`.

It measures the CPU time per turn of the runner's process, for the same episodes with and without the record. Everything is on: a renderer
with the whole Qwen vocabulary, Hermes tool calls, a tool that returns about 100 tokens, 64 sampled tokens a turn, masks, log-probs,
versions, a reward.

- over HTTP: the runner of benchmarks/overhead with its mock engine in a separate process, as in a run.
- no transport: with the scripted engine. The runner's own cost is lowest there, so the record's share is highest.

Rounds with and without the record alternate. The minima (other work on the machine only adds time) and the medians are reported. After each
round the record is read back and compared. Rounds over HTTP vary by more than the record costs. The bound of 10 % therefore applies to the
difference of the medians without transport (the same records, written by the same code), as a share of the median over HTTP without the
record. The exit status is 1 above the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from agentrl import ToolEnv, Trajectory, tool
from agentrl.engine.base import SamplingParams
from agentrl.engine.scripted import ScriptedEngine, ScriptedRequest
from agentrl.render import Renderer
from agentrl.reward import Scorer, resolve_rewards
from agentrl.rollout.env_instance import ThreadPools
from agentrl.rollout.episode import EpisodeRunner, Limits
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.store import EpisodeWriter, encode, read_episodes, to_record
from agentrl.types import FinishReason
from benchmarks.overhead.agent import document, exact_match, specs
from benchmarks.overhead.assets import SYSTEM, load, make_agent_renderer
from benchmarks.overhead.processes import Mock, Process

RESULTS = Path(__file__).parent / "results" / "recording_cpu.md"
MOST_SHARE = 0.10
"""of the runner's CPU per turn"""
HTTP = "over HTTP"
Rounds = list[tuple[float, float]]
"""CPU milliseconds of a turn without and with the record"""
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
    def write_turn(request: ScriptedRequest) -> list[int]:
        last = request.number >= turns - 1
        ids: list[int] = (_ASSETS.final if last else _ASSETS.calls[(request.number + 1) % 10])["ids"]
        return ids

    return EpisodeRunner(
        make_env=Search,
        env_class=Search,
        engine=ScriptedEngine(write_turn, end_id=_ASSETS.end_id),
        renderer=renderer,
        scorer=Scorer(resolve_rewards(Search.rewards)),
        pools=ThreadPools(Search),
        limits=Limits(max_turns=turns + 1, max_response_tokens=100_000, context_length=131_072),
        sampling=SamplingParams(max_new_tokens=1024),
        seed=0,
    )


async def measure(renderer: Renderer, episodes: int, turns: int, folder: Path | None) -> float:
    """CPU milliseconds per turn."""
    runner = make_runner(renderer, turns)
    writer = EpisodeWriter(folder) if folder is not None else None
    trajectories: list[Trajectory] = []

    def record_attempt(t: Trajectory) -> None:
        if writer is not None:
            writer.write(t, step=0, split="train", config="0" * 16)
        trajectories.append(t)

    started = time.process_time_ns()
    await Rollout(runner, RolloutLimits(concurrency=64)).run(specs(episodes), record_attempt)
    spent = time.process_time_ns() - started
    runner.close()
    if not all(t.score == 1.0 and len(t.turns) == turns for t in trajectories):
        first = trajectories[0]
        raise SystemExit(f"not as scripted: {first.stop_reason} {first.cause} after {len(first.turns)} turns")
    assert all(t.turns[-1].action.finish_reason is FinishReason.STOP for t in trajectories)
    if writer is not None and folder is not None:
        writer.close()
        check(trajectories, folder)
    return spent / 1e6 / (episodes * turns)


def check(trajectories: list[Trajectory], folder: Path) -> None:
    """Exit if the record differs from the trajectories."""
    recorded = {t.episode_id: t for t in read_episodes(folder)}
    wrong = [t.episode_id for t in trajectories if encode(to_record(recorded[t.episode_id])) != encode(to_record(t))]
    if wrong or len(recorded) != len(trajectories):
        raise SystemExit(f"{len(wrong)} of {len(trajectories)} recorded episodes differ from those that were run")


def in_process(episodes: int, turns: int, rounds: int) -> Rounds:
    """(without, with) of each round on the scripted engine."""
    renderer = make_agent_renderer()
    asyncio.run(measure(renderer, min(episodes, 32), turns, None))  # warm

    def one(record: bool) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(measure(renderer, episodes, turns, Path(folder) if record else None))

    return [(one(False), one(True)) for _ in range(rounds)]


def over_http(episodes: int, turns: int, rounds: int) -> Rounds:
    """(without, with) of each round in a worker of benchmarks/overhead on its mock engine."""
    with Mock(turns) as mock, Process("worker", "agent") as worker:

        def one(record: bool) -> float:
            result = worker.ask(address=mock.address, episodes=episodes, turns=turns, concurrency=64, record=record)
            if result["done"] != episodes or result["wrong"] or result["recorded"] != (episodes if record else 0):
                raise SystemExit(f"not as scripted: {result}")
            return float(result["cpu_ms_per_turn"])

        one(True)  # warm
        return [(one(False), one(True)) for _ in range(rounds)]


def summary(kind: str, turns: int, rounds: Rounds) -> dict[str, Any]:
    """The minimum and the median of a case."""
    off, on = (list(side) for side in zip(*rounds, strict=True))
    return {
        "runner": kind,
        "turns": turns,
        "off_ms": {"least": min(off), "median": median(off)},
        "on_ms": {"least": min(on), "median": median(on)},
        "share": {"least": min(on) / min(off) - 1, "median": median(b / a - 1 for a, b in rounds)},
    }


def verdict(rows: list[dict[str, Any]]) -> tuple[str, bool]:
    """A sentence with the shares, and whether they are within the bound."""
    whole = {r["turns"]: r["off_ms"]["median"] for r in rows if r["runner"] == HTTP}
    bare = {r["turns"]: r["on_ms"]["median"] - r["off_ms"]["median"] for r in rows if r["runner"] != HTTP}
    shares = ", ".join(
        f"{bare[t]:.3f} of {whole[t]:.3f} ms at {t} turns: **{bare[t] / whole[t]:.1%}**" for t in sorted(whole)
    )
    return f"The record's part of the runner's CPU a turn: {shares} (at most {MOST_SHARE:.0%}).", all(
        bare[t] <= MOST_SHARE * whole[t] for t in whole
    )


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| runner | turns | CPU ms/turn without: least, median | with | the record's share: of the least, median |"
    ]
    lines += ["|---|---|---|---|---|"]
    for r in rows:
        off, on = (f"{r[k]['least']:.3f}, {r[k]['median']:.3f}" for k in ("off_ms", "on_ms"))
        share = f"{r['share']['least']:.1%}, {r['share']['median']:.1%}"
        lines.append(f"| {r['runner']} | {r['turns']} | {off} | {on} | {share} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results/recording_cpu.{json,md}")
    args = parser.parse_args()
    rows = [
        summary(kind, turns, measured(args.episodes, turns, args.rounds))
        for kind, measured in ((HTTP, over_http), ("no transport", in_process))
        for turns in args.turns
    ]
    print(json.dumps(rows) if args.json else table(rows))
    sentence, within_bound = verdict(rows)
    print(sentence, file=sys.stderr)
    if args.write:
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M+00:00")
        where = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
        about = f"{when}, `python benchmarks/recording.py --write`, {where}; {args.episodes} episodes, {args.rounds} rounds."
        RESULTS.write_text("\n\n".join(["# The cost of recording", about, sentence, table(rows)]) + "\n")
        RESULTS.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return int(not within_bound)


if __name__ == "__main__":
    sys.exit(main())
