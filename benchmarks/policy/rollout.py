"""Batched search episodes with a transformers model: what the warm-up is measured with and what the bare GRPO loop samples from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from demonstrations import information, prompt

from agentrl.rewards.qa import exact_match

MAX_TURNS = 4
MAX_NEW_TOKENS = 40
MAX_CONTEXT = 512
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass
class Episode:
    """One finished episode; `mask` is 1 where the policy sampled."""

    row: dict[str, Any]
    ids: list[int]
    mask: list[int] = field(default_factory=list)
    answer: str | None = None
    searches: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def reward(self) -> float:
        """Exact match."""
        return exact_match(self.answer, self.row["golden_answers"])

    def extend(self, ids: list[int], mask: int) -> None:
        """Append tokens."""
        self.ids += ids
        self.mask += [mask] * len(ids)


@torch.no_grad()
def generate(model: Any, contexts: list[list[int]], stops: list[int], pad: int, temperature: float) -> list[list[int]]:
    """Sample one turn after each context; the stop token is kept."""
    device = model.device
    width = max(map(len, contexts))
    ids = torch.full((len(contexts), width), pad)
    mask = torch.zeros(len(contexts), width + MAX_NEW_TOKENS, dtype=torch.long)
    for i, context in enumerate(contexts):
        ids[i, width - len(context) :] = torch.tensor(context)
        mask[i, width - len(context) : width] = 1
    ids, mask = ids.to(device), mask.to(device)
    position = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
    stop = torch.tensor(stops, device=device)
    done = torch.zeros(len(contexts), dtype=torch.bool, device=device)
    cache, sampled = None, []
    for step in range(MAX_NEW_TOKENS):
        out = model(
            ids,
            attention_mask=mask[:, : width + step],
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        token = (
            torch.multinomial((logits / temperature).softmax(-1), 1)
            if temperature > 0
            else logits.argmax(-1, keepdim=True)
        )
        token = token.masked_fill(done[:, None], pad)
        sampled.append(token)
        done = done | torch.isin(token[:, 0], stop)
        if step % 4 == 3 and bool(done.all()):
            break
        ids, position = token, position[:, -1:] + 1
        mask[:, width + step] = 1
    turns = torch.cat(sampled, 1).tolist()
    for turn in turns:
        end = next((i + 1 for i, t in enumerate(turn) if t in stops), len(turn))
        del turn[end:]
    return turns


def rollout(model: Any, tokenizer: Any, rows: list[dict[str, Any]], temperature: float) -> list[Episode]:
    """Play one episode for each row."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    stops = [tokenizer.convert_tokens_to_ids(t) for t in ("</search>", "</answer>", "<|im_end|>", "<|endoftext|>")]
    episodes = [Episode(row, []) for row in rows]
    for e in episodes:
        e.extend(encode(prompt(e.row["question"])), 0)
    for _ in range(MAX_TURNS):
        active = [e for e in episodes if not e.done]
        if not active:
            break
        turns = generate(model, [e.ids for e in active], stops, tokenizer.pad_token_id, temperature)
        for e, turn in zip(active, turns, strict=True):
            e.extend(turn, 1)
            action = ACTION.search(tokenizer.decode(turn))
            if action is None or action[1] == "answer":
                e.answer, e.done = (action[2].strip() if action else None), True
                continue
            e.searches.append(action[2].strip())
            e.extend(encode(information(e.searches[-1])), 0)
            e.done = len(e.ids) + MAX_NEW_TOKENS > MAX_CONTEXT
    return episodes


def evaluate(model: Any, tokenizer: Any, rows: list[dict[str, Any]], temperature: float = 0.0) -> dict[str, float]:
    """Exact match over all rows and by hops, and the mean number of searches and tokens."""
    model.eval()
    episodes = rollout(model, tokenizer, rows, temperature)

    def mean(values: list[float]) -> float:
        return sum(values) / max(1, len(values))

    return {
        "em": mean([e.reward for e in episodes]),
        "em_1hop": mean([e.reward for e in episodes if e.row["metadata"]["hops"] == 1]),
        "em_2hop": mean([e.reward for e in episodes if e.row["metadata"]["hops"] == 2]),
        "answered": mean([float(e.answer is not None) for e in episodes]),
        "unknown": mean([float(e.answer == "unknown") for e in episodes]),
        "searches": mean([len(e.searches) for e in episodes]),
        "tokens": mean([len(e.ids) for e in episodes]),
        "sampled_tokens": mean([sum(e.mask) for e in episodes]),
    }
