"""The cost of rendering a turn: `python benchmarks/render.py [--write]`. The exit status is 1 if a bound is exceeded.

It measures the CPU time of `Renderer.delta` for an observation of 200 tokens with the real Qwen vocabulary: the median over many different texts.

- a tool's result of words (from Qwen's own 50,000, common ones more often, one in fifty unseen) at turn 4, 16 and 64;
- a user's message of such words at turn 64 of a conversation without tools;
- a tool's result of passages of the World Factbook, with its words in the cache as after some rollouts (warm), and with none of them (cold).

For comparison it measures the `tokenizers` library alone on the content, and one Jinja render of the conversation's last messages. The
candidates run alternately, so that other load on the machine affects them equally.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "render"))

from template_models import renderer

from agentrl.envs import factbook

TURNS = (4, 16, 64)
TOKENS = 200
MOST_MS, MOST_RATIO = 0.4, 1.2
"""the bounds: of a turn, with words in the cache; of turn 64 over turn 4"""
SEEN = 300
"""texts whose words are in the cache: a run has seen its commoner words after a few rollouts"""
RESULTS = Path(__file__).with_name("results")


def cpu_ms(work: Callable[[], Any]) -> float:
    """CPU milliseconds of one call."""
    started = time.process_time_ns()
    work()
    return (time.process_time_ns() - started) / 1e6


def words(ours: Any, seed: int) -> Iterator[str]:
    """Texts of 200 tokens, the same ones every time."""
    rng = random.Random(seed)
    ranked = sorted(ours.tokenizer.backend.get_vocab().items(), key=lambda item: item[1])
    known = [w[1:] for w, _ in ranked if w.startswith("Ġ") and w[1:].isascii() and w[1:].isalpha()][:50_000]
    weights = [1 / (i + 3) for i in range(len(known))]
    while True:
        picked = rng.choices(known, weights, k=TOKENS + 60)
        for i in range(0, len(picked), 50):
            picked[i] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7))
        yield cut(ours, " ".join(picked) + ".")


def passages(ours: Any, seed: int) -> Iterator[str]:
    """Passages of the Factbook, joined to 200 tokens."""
    listed = list(factbook.passages())
    random.Random(seed).shuffle(listed)
    text = ""
    for p in listed:
        text += f"{p.title}\n{p.text}\n"
        if len(ours.tokenizer.backend.encode(text, add_special_tokens=False).ids) >= TOKENS:
            yield cut(ours, text)
            text = ""


def cut(ours: Any, text: str) -> str:
    """Its first 200 tokens."""
    return str(ours.tokenizer.decode(ours.tokenizer.backend.encode(text, add_special_tokens=False).ids[:TOKENS]))


def measure(repeats: int) -> dict[str, float]:
    """Medians, in CPU milliseconds."""
    ours = renderer("chatml", None)
    took: dict[str, list[float]] = {}
    sampled = (*ours.tokenizer.encode("I will look."), ours.end_id)

    def turn(message: dict[str, Any], history: list[dict[str, Any]]) -> float:
        return cpu_ms(partial(ours.delta, [message], sampled, history=history, tools=[{}]))

    def note(name: str, ms: float) -> None:
        took.setdefault(name, []).append(ms)

    fresh, histories, asked = words(ours, 0), {n: conversation(n) for n in TURNS}, questions(64)
    for _ in range(SEEN):
        turn(tool(next(fresh)), histories[4])
        turn(user(next(fresh)), asked)
    for i in range(repeats):
        for n in (*TURNS[i % 3 :], *TURNS[: i % 3]):
            note(f"turn {n}", turn(tool(text := next(fresh)), histories[n]))
        note("turn 64, users only", turn(user(next(fresh)), asked))
        note("tokenizers alone", cpu_ms(partial(ours.tokenizer.backend.encode, text, add_special_tokens=False)))
    facts = passages(ours, 0)
    for _ in range(SEEN):
        turn(tool(next(facts)), histories[4])
    for _, text in zip(range(repeats // 2), facts, strict=False):
        note("Factbook, warm", turn(tool(text), histories[4]))
        note(
            "Factbook, tokenizers alone", cpu_ms(partial(ours.tokenizer.backend.encode, text, add_special_tokens=False))
        )
    for _, text in zip(range(repeats // 4), passages(ours, 1), strict=False):
        ours.tokenizer._content.cache._words.clear()
        note("Factbook, cold", turn(tool(text), histories[4]))
    three = conversation(2)[-3:]
    took["jinja, three messages"] = [
        cpu_ms(partial(ours._template.render, three, tools=None, generate=True)) for _ in range(repeats)
    ]
    return {name: statistics.median(times) for name, times in took.items()}


def bounds(medians: dict[str, float]) -> dict[str, tuple[float, float]]:
    """(found, most) of what is bounded."""
    bounded = [name for name in medians if name.startswith("turn")] + ["Factbook, warm"]
    found = {f"{name}: CPU ms": (medians[name], MOST_MS) for name in bounded}
    return {**found, "turn 64 / turn 4": (medians["turn 64"] / medians["turn 4"], MOST_RATIO)}


def table(medians: dict[str, float], kept: dict[str, tuple[float, float]]) -> str:
    """Both, to be read."""
    lines = ["| an observation of 200 tokens | CPU ms, median |", "|---|---|"]
    lines += [f"| {name} | {ms:.3f} |" for name, ms in medians.items()]
    lines += ["", "| bound | found | at most | |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {n} | {x:.3f} | {most} | {verdict(x, most)} |" for n, (x, most) in kept.items()])


def verdict(found: float, most: float) -> str:
    return "kept" if found <= most else "NOT KEPT"


def main() -> int:
    """Measure, print, and with `--write` keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep in benchmarks/results/render_cpu.{json,md}")
    parser.add_argument("--repeats", type=int, default=1500)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    medians = measure(args.repeats)
    kept = bounds(medians)
    shown = table(medians, kept)
    print(shown)
    if args.write:
        at, cores = datetime.now(UTC).isoformat(timespec="minutes"), len(os.sched_getaffinity(0))
        machine = f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"
        found = {n: {"found": x, "most": most, "kept": x <= most} for n, (x, most) in kept.items()}
        facts = {
            "at": at,
            "machine": machine,
            "load": load,
            "repeats": args.repeats,
            "cpu_ms": medians,
            "bounds": found,
        }
        head = (
            f"{at}, `python benchmarks/render.py --write`, {machine}, load {load:.1f}; median of {args.repeats} texts."
        )
        (RESULTS / "render_cpu.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "render_cpu.md").write_text(
            f"# What rendering a turn costs\n\n{head}\n\n{shown}\n", encoding="utf-8"
        )
    return int(any(x > most for x, most in kept.values()))


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "search", "tool_call_id": "call_0", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def conversation(turns: int) -> list[dict[str, Any]]:
    """A history of so many turns with a tool."""
    turn = [{"role": "assistant", "content": "I will look."}, tool("a result")]
    return [user("a question"), *(m for _ in range(turns) for m in turn)]


def questions(turns: int) -> list[dict[str, Any]]:
    """A history of so many turns with a user."""
    turn = [{"role": "assistant", "content": "I see."}, user("another question")]
    return [user("a question"), *(m for _ in range(turns) for m in turn)]


if __name__ == "__main__":
    sys.exit(main())
