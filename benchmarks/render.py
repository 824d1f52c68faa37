"""Measure the CPU time of rendering a turn: `python benchmarks/render.py [--write]`. Exit status 1 if a bound is exceeded.

First table: CPU time of `Renderer.delta` for an observation of 200 tokens, with the real Qwen vocabulary, the median over many new texts:

- a tool's result of words (Qwen's 50,000 words, the first ones the commonest, one in fifty never seen before) at turn 4, 16 and 64;
- a user's message of such words at turn 64 of a conversation without tools;
- a tool's result of passages of the World Factbook, with its words in the cache as after some rollouts (warm), and with none (cold).

For comparison: the `tokenizers` library alone on the content, and one Jinja render of the conversation's last messages.

Second table: CPU time per turn of rendering and parsing whole episodes (a prompt, four turns of 64 sampled tokens, three observations of 100
tokens, groups of 8) with and without each accelerator. Alternatives are measured in turns, so that other load on the machine affects all
of them alike.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "render"))

from template_models import renderer

from agentrl.envs import factbook
from agentrl.render.accelerators.memo import Memo
from agentrl.render.delta_template import DeltaTemplate
from agentrl.types import FinishReason

TURNS = (4, 16, 64)
MOST_MS, MOST_RATIO = 0.4, 1.2
"""the bounds: of a turn, with words in the cache; of turn 64 over turn 4"""
SEEN = 300
"""texts whose words are in the cache: a run has seen its commoner words after a few rollouts"""
EPISODE_TURNS, GROUP = 4, 8
RESULTS = Path(__file__).with_name("results")
Message = dict[str, Any]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the corpus.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to search for"}},
            "required": ["query"],
        },
    },
}


def cpu_ms(work: Callable[[], Any]) -> float:
    """CPU milliseconds of one call."""
    started = time.process_time_ns()
    work()
    return (time.process_time_ns() - started) / 1e6


def words(ours: Any, seed: int, tokens: int = 200) -> Iterator[str]:
    """Texts of so many tokens, the same ones for a seed."""
    rng = random.Random(seed)
    ranked = sorted(ours.tokenizer.backend.get_vocab().items(), key=lambda item: item[1])
    known = [w[1:] for w, _ in ranked if w.startswith("Ġ") and w[1:].isascii() and w[1:].isalpha()][:50_000]
    weights = [1 / (i + 3) for i in range(len(known))]
    while True:
        picked = rng.choices(known, weights, k=tokens + 60)
        for i in range(0, len(picked), 50):
            picked[i] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7))
        yield first_tokens(ours, " ".join(picked) + ".", tokens)


def passages(ours: Any, seed: int, tokens: int = 200) -> Iterator[str]:
    """Passages of the Factbook, joined to so many tokens."""
    listed = list(factbook.passages())
    random.Random(seed).shuffle(listed)
    text = ""
    for p in listed:
        text += f"{p.title}\n{p.text}\n"
        if len(ours.tokenizer.backend.encode(text, add_special_tokens=False).ids) >= tokens:
            yield first_tokens(ours, text, tokens)
            text = ""


def first_tokens(ours: Any, text: str, tokens: int) -> str:
    return str(ours.tokenizer.decode(ours.tokenizer.backend.encode(text, add_special_tokens=False).ids[:tokens]))


def measure(repeats: int) -> dict[str, float]:
    """Medians of the first table, in CPU milliseconds."""
    ours = renderer("chatml", None)
    took: dict[str, list[float]] = {}
    sampled = (*ours.tokenizer.encode("I will look."), ours.end_id)

    def turn(message: Message, history: list[Message]) -> float:
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


def accelerators(episodes: int) -> dict[str, tuple[float, float]]:
    """The second table: medians with and without each accelerator, in CPU milliseconds a turn."""
    ours = renderer("chatml", None)
    fresh = words(ours, 2, 100)
    seen = [next(fresh) for _ in range(64)]
    system: Message = {"role": "system", "content": next(fresh)}
    call = '\n<tool_call>\n{"name": "search", "arguments": {"query": "capital and population"}}\n</tool_call>'
    sampled = (*ours.tokenizer.encode(first_tokens(ours, next(fresh), 63 - 26) + call), ours.end_id)

    def episode(number: int, texts: list[str]) -> None:
        history = [system, user(f"Question {number // GROUP}: which of the regions has the larger population?")]
        context = [i for _, ids in ours.prompt(history, [SCHEMA]) for i in ids]
        for i in range(EPISODE_TURNS):
            action = ours.parse(sampled, FinishReason.STOP, 8, context=context)
            if i < len(texts):
                ours.delta([tool(texts[i])], sampled, history=history, tools=[SCHEMA])
                history = [*history, ours.message(action), tool(texts[i])]

    without: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "words from a cache": lambda: mock.patch.object(ours.tokenizer._content, "cache", None),
        "observations kept": lambda: mock.patch.object(DeltaTemplate, "pieces", DeltaTemplate.encode),
        "first prompts kept": lambda: mock.patch.object(ours, "_prompts", Memo(0)),
        "text by the bytes of tokens": lambda: mock.patch.object(ours.tokenizer, "_token_bytes", None),
        "delta templates": lambda: mock.patch.object(DeltaTemplate, "pieces", no_pieces),
    }
    took: dict[tuple[str, bool], list[float]] = {}
    for number in range(0, episodes, GROUP):
        for name, off in without.items():
            for accelerated in (True, False):
                texts = [
                    [
                        random.choice(seen) if name == "observations kept" else next(fresh)
                        for _ in range(EPISODE_TURNS - 1)
                    ]
                    for _ in range(GROUP)
                ]
                with nullcontext() if accelerated else off():
                    ms = sum(cpu_ms(partial(episode, number + i, t)) for i, t in enumerate(texts))
                took.setdefault((name, accelerated), []).append(ms / GROUP / EPISODE_TURNS)
    medians = {key: statistics.median(times[len(times) // 4 :]) for key, times in took.items()}
    return {name: (medians[name, True], medians[name, False]) for name in without}


def no_pieces(template: DeltaTemplate, contents: Sequence[str]) -> None:
    """In place of `DeltaTemplate.pieces`: the renderer then renders the delta."""


def bounds(medians: dict[str, float]) -> dict[str, tuple[float, float]]:
    """(measured, most) of what is bounded."""
    bounded = [name for name in medians if name.startswith("turn")] + ["Factbook, warm"]
    measured = {f"{name}: CPU ms": (medians[name], MOST_MS) for name in bounded}
    return {**measured, "turn 64 / turn 4": (medians["turn 64"] / medians["turn 4"], MOST_RATIO)}


def table(
    medians: dict[str, float], kept: dict[str, tuple[float, float]], parts: dict[str, tuple[float, float]]
) -> str:
    """All tables as Markdown."""
    lines = ["| an observation of 200 tokens | CPU ms, median |", "|---|---|"]
    lines += [f"| {name} | {ms:.3f} |" for name, ms in medians.items()]
    lines += ["", "| bound | measured | at most | |", "|---|---|---|---|"]
    lines += [f"| {n} | {x:.3f} | {most} | {'kept' if x <= most else 'EXCEEDED'} |" for n, (x, most) in kept.items()]
    lines += ["", "| accelerator | CPU ms a turn with it | without | saved |", "|---|---|---|---|"]
    lines += [f"| {n} | {on:.3f} | {off:.3f} | {off - on:.3f} |" for n, (on, off) in parts.items()]
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and with `--write` keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep in benchmarks/results/render_cpu.{json,md}")
    parser.add_argument("--repeats", type=int, default=1500, metavar="N", help="texts (default: %(default)s)")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    medians = measure(args.repeats)
    parts = accelerators(args.repeats)
    kept = bounds(medians)
    shown = table(medians, kept, parts)
    print(shown)
    if args.write:
        at, cores = datetime.now(UTC).isoformat(timespec="minutes"), len(os.sched_getaffinity(0))
        machine = f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"
        facts = {
            "at": at,
            "machine": machine,
            "load": load,
            "repeats": args.repeats,
            "cpu_ms": medians,
            "bounds": {n: {"found": x, "most": most, "kept": x <= most} for n, (x, most) in kept.items()},
            "accelerators": {n: {"with": on, "without": off} for n, (on, off) in parts.items()},
        }
        head = (
            f"{at}, `python benchmarks/render.py --write`, {machine}, load {load:.1f}; median of {args.repeats} texts."
        )
        (RESULTS / "render_cpu.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "render_cpu.md").write_text(
            f"# What rendering a turn costs\n\n{head}\n\n{shown}\n", encoding="utf-8"
        )
    return int(any(x > most for x, most in kept.values()))


def tool(text: str) -> Message:
    return {"role": "tool", "name": "search", "tool_call_id": "call_0", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def conversation(turns: int) -> list[Message]:
    """A history of so many turns with a tool."""
    turn = [{"role": "assistant", "content": "I will look."}, tool("a result")]
    return [user("a question"), *(m for _ in range(turns) for m in turn)]


def questions(turns: int) -> list[Message]:
    """A history of so many turns with a user."""
    turn = [{"role": "assistant", "content": "I see."}, user("another question")]
    return [user("a question"), *(m for _ in range(turns) for m in turn)]


if __name__ == "__main__":
    sys.exit(main())
