"""Replay a recorded search_r1 run: it must be identical, in a tenth of the rollouts' time. Then replay it with five planted faults.

    python benchmarks/replay.py [--rollouts 4] [--write]

`agentrl rollout` records 128 episodes per rollout with the embedded policy on the local engine. `agentrl replay` replays them three times in
separate processes; the median of the seconds that it prints is compared with the rollouts' seconds in timings.jsonl. Then a fault is planted in
the template, a parser, the environment, a reward or a limit. The expected cause, turn and token of every episode are derived here from the
recorded tokens alone; episodes that the fault does not affect must be identical.

The exit status is 1 if anything differs from that.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from agentrl.cli.main import main as agentrl
from agentrl.cli.replay_command import rollout_seconds
from agentrl.render import Tokenizer
from agentrl.render.formats.inline_tags import TagFormat
from agentrl.run.model_folder import model_folder
from agentrl.store import read_episodes
from agentrl.types import Action, Provenance, Span, Trajectory

RESULTS = Path(__file__).parent / "results"
MOST_RATIO = 0.1
MODEL = "search_r1_3m"
PLANTED = '''
from dataclasses import replace

from agentrl import reward
from agentrl.envs.search_r1 import SearchR1


class Marked(SearchR1):
    """The second observation begins with a mark."""

    turn = 0

    async def step(self, action):
        result = await super().step(action)
        self.turn += 1
        if self.turn != 2 or not result.observation:
            return result
        return replace(result, observation=[{**m, "content": "!" + m["content"]} for m in result.observation])


@reward(name="em")
def generous(trajectory):
    return 1.0
'''

Place = tuple[str, int, int]
"""cause, turn, token"""


@dataclass(frozen=True)
class Fault:
    """A change of the code under which a run is replayed, and the differences that it must cause."""

    name: str
    words: list[str]
    """flags of `agentrl replay`"""
    expected: Callable[[Trajectory], Place | None]
    """None: the episode is identical"""
    plant: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def span(t: Trajectory, turn: int, kind: Provenance) -> tuple[int, Span] | None:
    """(index of its first token, span) of a turn in the only segment."""
    at = 0
    for s in t.segments[0].spans:
        if s.turn == turn and s.provenance is kind:
            return at, s
        at += len(s.ids)
    return None


@contextmanager
def answers_in_lower_case() -> Iterator[None]:
    parse = TagFormat.parse

    def lower(*given: Any) -> Action:
        action = parse(*given)
        return replace(action, answer=action.answer and action.answer.lower())

    with mock.patch.object(TagFormat, "parse", lower):
        yield


def faults(folder: Path) -> list[Fault]:
    """The five faults; their files go into `folder`."""
    tokenizer = Tokenizer.load(model_folder(MODEL))
    (folder / "planted.py").write_text(PLANTED)
    other = folder / "model"
    shutil.copytree(model_folder(MODEL), other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("<|im_start|>assistant\\n", "<|im_start|>assistant:\\n")
    (other / "tokenizer_config.json").write_text(json.dumps(config))

    def template(t: Trajectory) -> Place:
        """The last token of the prompt, a line break, differs."""
        length = t.turns[0].context_length
        assert tokenizer.decode(t.segments[0].ids[length - 1 : length]) == "\n"
        return "template", -1, length - 1

    def parser(t: Trajectory) -> Place | None:
        """The token with the first capital letter of the answer."""
        answer = t.turns[-1].action.answer
        if answer is None or answer == answer.lower():
            return None
        sampled = span(t, len(t.turns) - 1, Provenance.SAMPLED)
        assert sampled is not None
        begin, generated = sampled
        text = tokenizer.decode(generated.ids)
        letter = text.index(answer) + next(i for i, c in enumerate(answer) if c != c.lower())
        ends = (len(tokenizer.decode(generated.ids[: i + 1])) for i in range(len(generated.ids)))
        return "parser", len(t.turns) - 1, begin + next(i for i, end in enumerate(ends) if end > letter)

    def environment(t: Trajectory) -> Place | None:
        """The first token of the second observation."""
        observation = span(t, 1, Provenance.OBSERVATION)
        return None if observation is None else ("env", 1, observation[0])

    def reward(t: Trajectory) -> Place | None:
        """The last token."""
        return None if t.rewards["em"] == 1.0 else ("reward", len(t.turns) - 1, len(t.segments[0]) - 1)

    def limit(t: Trajectory) -> Place | None:
        """The first token after the first generation."""
        sampled = span(t, 0, Provenance.SAMPLED)
        return None if len(t.turns) == 1 or sampled is None else ("limit", 0, sampled[0] + len(sampled[1].ids))

    return [
        Fault("template: 'assistant:' in the header", ["--hf-checkpoint", str(other)], template),
        Fault("parser: answers in lower case", [], parser, answers_in_lower_case),
        Fault(
            "environment: a mark before the second observation", ["--env", f"{folder}/planted.py:Marked"], environment
        ),
        Fault("reward: em is always 1", ["--reward", f"{folder}/planted.py:generous", "f1=0"], reward),
        Fault("limit: one turn", ["--max-turns", "1"], limit),
    ]


def planted(fault: Fault, run: Path, out: Path) -> dict[str, Any]:
    """Replay under a fault, and count the episodes that differ elsewhere than they must."""
    with fault.plant(), contextlib.redirect_stdout(io.StringIO()) as output:
        status = agentrl(["replay", str(run), "--out", str(out), *fault.words])
    differences = {}
    for row in map(json.loads, out.read_text().splitlines()):
        divergence = row["divergence"]
        differences[row["episode_id"]] = divergence and tuple(divergence[key] for key in ("cause", "turn", "token"))
    expected = {t.episode_id: fault.expected(t) for t in read_episodes(run)}
    wrong = [episode for episode in expected if differences.get(episode, "missing") != expected[episode]]
    for episode in wrong[:3]:
        found = differences.get(episode, "nothing")
        print(f"{fault.name}: episode {episode} must differ at {expected[episode]}, replay reports {found}")
    if status != 1:
        print(f"{fault.name}: exit status {status}\n{output.getvalue()}")
    differ = sum(place is not None for place in expected.values())
    ok = not wrong and status == 1 and differ > 0
    return {"fault": fault.name, "episodes": len(expected), "must_differ": differ, "wrong": len(wrong), "ok": ok}


def measure(rollouts: int, folder: Path) -> dict[str, Any]:
    run = folder / "run"
    command = [sys.executable, "-m", "agentrl.cli"]
    words = ["--env", "search_r1", "--num-rollout", str(rollouts), "--run", str(run)]
    subprocess.run([*command, "rollout", *words], check=True)
    seconds, identical = [], True
    for _ in range(3):
        process = subprocess.run([*command, "replay", str(run)], capture_output=True, text=True, check=False)
        print(process.stdout, process.stderr, sep="")
        lines = process.stdout.splitlines()
        identical &= process.returncode == 0 and lines[0].endswith("episodes replayed: identical")
        seconds.append(float(lines[-1].split(" s")[0]) if process.returncode == 0 else float("inf"))
    spent = rollout_seconds(run)
    episodes = sum(1 for _ in read_episodes(run))
    replayed = statistics.median(seconds)
    return {
        "episodes": episodes,
        "turns": sum(len(t.turns) for t in read_episodes(run)),
        "identical": identical,
        "rollout_s": round(spent, 1),
        "replay_s": seconds,
        "ratio": round(replayed / spent, 4),
        "most_ratio": MOST_RATIO,
        "planted": [planted(f, run, folder / f"{n}.jsonl") for n, f in enumerate(faults(folder))],
    }


def page(results: dict[str, Any]) -> str:
    """The page of results, as Markdown."""
    replays = ", ".join(f"{seconds:.1f}" for seconds in results["replay_s"])
    outcome = "identical" if results["identical"] else "NOT IDENTICAL"
    recorded = (
        f"{results['episodes']} episodes with {results['turns']} turns, embedded policy, local engine: "
        f"rollouts {results['rollout_s']:.1f} s;"
    )
    replayed = (
        f"replay {replays} s ({outcome} each time), the median is **{results['ratio']:.3f}** of the rollouts' time "
        f"(bound {MOST_RATIO})."
    )
    lines = ["# Replay of a search_r1 run on one CPU machine", ""]
    lines += [
        f"{results['machine']}. Command: `python benchmarks/replay.py --write`.",
        "",
        f"{recorded} {replayed}",
        "",
    ]
    lines += ["| planted fault | episodes that must differ | at another cause, turn or token |", "|---|---|---|"]
    lines += [f"| {p['fault']} | {p['must_differ']} of {p['episodes']} | {p['wrong']} |" for p in results["planted"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4, help="of 128 episodes each")
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results/replay_cpu.{json,md}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(args.rollouts, Path(folder))
    when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M+00:00")
    load = os.getloadavg()[0]
    results["machine"] = f"{when}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}"
    print(page(results))
    if args.write:
        (RESULTS / "replay_cpu.json").write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / "replay_cpu.md").write_text(page(results))
    return (
        0 if results["identical"] and results["ratio"] <= MOST_RATIO and all(p["ok"] for p in results["planted"]) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
