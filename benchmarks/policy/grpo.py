"""A bare GRPO loop on the search_r1 policy, without the toolkit: what to expect of a setting, and a yardstick for the real trainer.

python benchmarks/policy/grpo.py agentrl/assets/search_r1_3m --steps 40
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rollout import Episode, evaluate, rollout
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.envs.factbook import questions


def pad(episodes: list[Episode], token: int, device: Any) -> tuple[Any, Any]:
    """Right-padded ids and masks."""
    width = max(len(e.ids) for e in episodes)
    ids = torch.tensor([e.ids + [token] * (width - len(e.ids)) for e in episodes])
    mask = torch.tensor([e.mask + [0] * (width - len(e.ids)) for e in episodes], dtype=torch.float)
    return ids.to(device), mask.to(device)


def log_probs(model: Any, ids: Any) -> Any:
    """Of each next token."""
    return -F.cross_entropy(model(ids[:, :-1]).logits.float().transpose(1, 2), ids[:, 1:], reduction="none")


def update(
    model: Any, optimizer: Any, episodes: list[Episode], advantages: Any, args: argparse.Namespace, token: int
) -> dict[str, float]:
    """`updates` optimizer steps on one rollout, each on an equal share of its groups."""
    share = len(episodes) // args.updates
    stats: dict[str, float] = {}
    parts = []
    for u in range(args.updates):
        part = [i for i in range(u * share, (u + 1) * share) if abs(advantages[i]) > 1e-6]
        parts.append(sorted(part, key=lambda i: len(episodes[i].ids)))
    old: dict[int, Any] = {}
    for part in parts[1:]:
        for first in range(0, len(part), args.micro):
            some = part[first : first + args.micro]
            with torch.no_grad():
                old |= dict(
                    zip(some, log_probs(model, pad([episodes[i] for i in some], token, model.device)[0]), strict=True)
                )
    for part in filter(None, parts):
        total = sum(sum(episodes[i].mask) for i in part)
        for first in range(0, len(part), args.micro):
            some = part[first : first + args.micro]
            ids, mask = pad([episodes[i] for i in some], token, model.device)
            adv = torch.tensor([advantages[i] for i in some], device=model.device)[:, None]
            new = log_probs(model, ids)
            before = torch.stack([old[i] for i in some]) if some[0] in old else new.detach()
            ratio = (new - before).exp()
            gain = torch.min(ratio * adv, ratio.clamp(1 - args.clip, 1 + args.clip) * adv) * mask[:, 1:]
            loss = -(gain.sum() / total if args.loss == "token" else (gain.sum(1) / mask[:, 1:].sum(1)).sum() / share)
            loss.backward()
        stats["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return stats


def main(args: argparse.Namespace) -> None:
    """Train, and print the curve as JSON lines."""
    torch.manual_seed(args.seed)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(args.threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, args.beta2), weight_decay=0.0)
    rows, test = questions("train"), questions("test", limit=args.eval)
    rng = random.Random(args.seed)
    tag = args.tag or f"lr={args.lr:g} {args.prompts}x{args.group} u={args.updates} {args.loss} seed={args.seed}"
    began, evals = time.time(), 0.0

    def report(step: int, **more: Any) -> None:
        nonlocal evals
        t = time.time()
        result = {k: round(v, 3) for k, v in evaluate(model, tokenizer, test).items()}
        evals += time.time() - t
        print(
            json.dumps({"run": tag, "step": step, "s": round(time.time() - began - evals, 1), **result, **more}),
            flush=True,
        )

    report(0)
    recent: list[float] = []
    times = [0.0, 0.0]
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / args.lr_warmup)
        t = time.time()
        batch = [row for row in rng.sample(rows, args.prompts) for _ in range(args.group)]
        model.eval()
        episodes = rollout(model, tokenizer, batch, 1.0)
        times[0] += time.time() - t
        t = time.time()
        reward = torch.tensor([e.reward for e in episodes]).view(args.prompts, args.group)
        advantages = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).flatten().tolist()
        model.train()
        stats = update(model, optimizer, episodes, advantages, args, tokenizer.pad_token_id)
        times[1] += time.time() - t
        recent.append(float(reward.mean()))
        if args.verbose:
            print(step, round(recent[-1], 3), stats, [round(x / step, 2) for x in times], flush=True)
        if step % args.every == 0 or step == args.steps:
            mixed = float(((reward.mean(1) > 0) & (reward.mean(1) < 1)).float().mean())
            last = recent[-args.every :]
            report(
                step,
                train=round(sum(last) / len(last), 3),
                mixed=mixed,
                rollout_s=round(times[0] / step, 2),
                train_s=round(times[1] / step, 2),
            )
    if args.out:
        model.to(torch.bfloat16).save_pretrained(args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tag", default="")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--lr-warmup", type=int, default=5)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--loss", choices=("token", "episode"), default="token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--eval", type=int, default=200)
    parser.add_argument("--device", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    main(parser.parse_args())
