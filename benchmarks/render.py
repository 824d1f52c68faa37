"""Cost of rendering a turn: `python benchmarks/render.py [--json]`.

CPU time of `Renderer.delta` for a tool's result of 200 tokens, with the real Qwen vocabulary, at turn 4, 16 and 64 of a conversation, the
median over many texts, each of them new (words drawn from a list of 50,000, one in fifty never seen before); beside it what the
`tokenizers` library alone takes for the content, and one Jinja render of the conversation's last messages.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "render"))

from template_models import renderer

TURNS = (4, 16, 64)
TOKENS = 200


def cpu_ms(work: Callable[[], Any]) -> float:
    """CPU milliseconds of one call."""
    started = time.process_time_ns()
    work()
    return (time.process_time_ns() - started) / 1e6


def texts(ours: Any, n: int, seed: int) -> list[str]:
    """Observations of 200 tokens each."""
    rng = random.Random(seed)
    vocabulary = [
        w for w in ours.tokenizer.backend.get_vocab() if w.startswith("Ġ") and w[1:].isalpha() and w.isascii() is False
    ][:50_000]
    words = [w[1:] for w in vocabulary if w[1:].isascii()]
    weights = [1 / (i + 3) for i in range(len(words))]
    found = []
    for _ in range(n):
        picked = rng.choices(words, weights, k=TOKENS + 60)
        for i in range(0, len(picked), 50):
            picked[i] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7))
        ids = ours.tokenizer.encode_plain(" ".join(picked) + ".")[:TOKENS]
        found.append(ours.tokenizer.decode(ids))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=1500)
    args = parser.parse_args()
    ours = renderer("chatml", None)
    sampled = (*ours.tokenizer.encode("I will look."), ours.end_id)
    for text in texts(ours, 300, 0):  # a run has seen its commoner words after a few rollouts
        ours.delta([tool(text)], sampled)
    histories = {turn: conversation(turn) for turn in TURNS}
    took: dict[str, list[float]] = {}
    fresh_texts = iter(texts(ours, args.repeats * len(TURNS), 1))
    for i in range(args.repeats):  # in turns, so that whatever else the machine does falls on all alike
        for turn in (*TURNS[i % 3 :], *TURNS[: i % 3]):
            text = next(fresh_texts)
            fresh = [tool(text)]
            took.setdefault(f"delta_ms_turn_{turn}", []).append(
                cpu_ms(partial(ours.delta, fresh, sampled, history=histories[turn], tools=[{}]))
            )
        took.setdefault("tokenizers_ms", []).append(  # of the same text as the last delta
            cpu_ms(partial(ours.tokenizer.backend.encode, text, add_special_tokens=False))
        )
    three = conversation(2)[-3:]
    took["jinja_ms"] = [
        cpu_ms(partial(ours._template.render, three, tools=None, generate=True)) for _ in range(args.repeats)
    ]
    results = {name: statistics.median(times) for name, times in took.items()}
    results["turn_64_over_turn_4"] = results["delta_ms_turn_64"] / results["delta_ms_turn_4"]
    if args.json:
        print(json.dumps({k: round(v, 4) for k, v in results.items()}))
        return
    for name, value in results.items():
        print(f"{name:<22}{value:8.4f}")


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "search", "tool_call_id": "call_0", "content": text}


def conversation(turns: int) -> list[dict[str, Any]]:
    """A history of so many turns with a tool."""
    turn = [{"role": "assistant", "content": "I will look."}, tool("a result")]
    return [{"role": "user", "content": "a question"}, *(m for _ in range(turns) for m in turn)]


if __name__ == "__main__":
    main()
