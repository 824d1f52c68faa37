"""Scripted search episodes for the warm-up of the search_r1 policy: real questions, real BM25 results, an imperfect demonstrator.

The demonstrator knows the format and copies answers exactly, but it searches well only some of the time (`care`): otherwise it types
the words of the question, also where the question takes two searches, and gives up when that finds nothing. So the warmed-up policy
has every behaviour it needs, and reinforcement learning has to find out which of them pay.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentrl.envs.factbook import FIELDS, Record, Renaming, expert_plan, passages, records
from agentrl.tools.retrieval import BM25Retriever, show

TOP_K = 3
PASSAGE_CHARS = 80
MAX_SEARCHES = 3
GIVE_UP = "unknown"


@lru_cache(maxsize=1)
def _retriever() -> BM25Retriever:
    return BM25Retriever(passages())


@lru_cache(maxsize=200_000)
def search(query: str) -> str:
    """The passages shown for a query."""
    return show(_retriever().search([query], TOP_K)[0], max_chars=PASSAGE_CHARS)


def prompt(question: str) -> str:
    """The chat template's rendering of the question and of the assistant's header."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def information(query: str) -> str:
    """What is inserted after a search."""
    return f"\n<information>{search(query)}</information>\n"


@dataclass
class Demonstration:
    """An episode as pieces of text, each tokenised as one string; the trained ones are the demonstrator's own."""

    pieces: list[tuple[str, bool]]
    answer: str
    hops: int


def demonstrate(row: dict[str, Any], rng: random.Random, *, care: float, renaming: float) -> Demonstration:
    """One episode about a question; with probability `renaming` its country is disguised."""
    record: Record = records()[row["metadata"]["country"]]
    hops: int = row["metadata"]["hops"]
    disguise = Renaming(rng, record) if rng.random() < renaming else None

    def told(text: str) -> str:
        return disguise.apply(text) if disguise else text

    label, answer = FIELDS[row["metadata"]["field"]].label, row["golden_answers"][0]
    target = f"- {record.name} - {FIELDS[row['metadata']['field']].path[1]}: "
    bridge = f"- {record.name} - Capital: name: {record.facts['capital'][0]}"
    careful = list(expert_plan(row).queries)
    subject = record.facts["capital"][0] if hops == 2 else record.name
    pieces, reply, failed = [(told(prompt(row["question"])), False)], GIVE_UP, False
    for _ in range(MAX_SEARCHES):
        takes_care = failed or rng.random() < care
        query = careful[0] if takes_care else f"{subject} {label}"
        pieces += [(f"<search> {told(query)}</search>", True), (told(information(query)), False)]
        found = search(query).splitlines()
        if any(line.startswith(target) and answer in line for line in found):
            reply = answer
            break
        if takes_care and len(careful) == 2 and any(line.startswith(bridge) for line in found):
            careful, subject, failed = careful[1:], record.name, False
        elif takes_care or rng.random() >= care:
            break
        else:
            failed = True
    return Demonstration([*pieces, (f"<answer> {told(reply)}</answer>", True)], reply, hops)
