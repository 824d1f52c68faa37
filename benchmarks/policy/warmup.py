"""Make the checkpoint `agentrl/assets/search_r1_3m`: a tokenizer, a small Qwen3, and supervised training on scripted episodes.

    python benchmarks/policy/warmup.py --out agentrl/assets/search_r1_3m --tokenizer-only      # once, on a CPU
    python benchmarks/policy/warmup.py --out agentrl/assets/search_r1_3m                       # a minute on a GPU

What is trained, and how, is in the flags' defaults: batch, steps, learning rate, share of disguised episodes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demonstrations import demonstrate
from rollout import evaluate
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentrl.envs.factbook import countries, questions, records

TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(out: Path, vocabulary: int) -> None:
    """Byte-level BPE on half disguised demonstrations about training countries; held-out names get no tokens, digits stay single."""
    rng, rows = random.Random(1), questions("train")
    texts = [
        "".join(p for p, _ in demonstrate(rng.choice(rows), rng, care=0.5, renaming=0.5).pieces) for _ in range(20_000)
    ]
    bpe = Tokenizer(models.BPE())
    pieces = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    held_out = [value for name in countries("test") for value in (name, records()[name].facts["capital"][0])]
    hidden = re.compile("|".join(map(re.escape, sorted(held_out, key=len, reverse=True))))
    between = re.compile("|".join(map(re.escape, [*special, *TAGS])))
    texts = [part for text in texts for part in between.split(hidden.sub("", text)) if part]
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    out.mkdir(parents=True, exist_ok=True)
    bpe.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print("vocabulary", bpe.get_vocab_size())


def make_model(tokenizer: Any) -> Any:
    """The policy with fresh weights."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_batch(
    tokenizer: Any, rows: list[dict[str, Any]], rng: random.Random, args: argparse.Namespace
) -> tuple[Any, Any]:
    """Right-padded ids and the mask of the tokens that are trained."""
    episodes = []
    for _ in range(args.batch):
        row = rng.choice(rows)
        while row["metadata"]["hops"] == 1 and rng.random() < args.skip_one_hop:
            row = rng.choice(rows)
        episodes.append(demonstrate(row, rng, care=args.care, renaming=args.renaming).pieces)
    encoded = iter(
        tokenizer([text for pieces in episodes for text, _ in pieces], add_special_tokens=False)["input_ids"]
    )
    ids, mask = [], []
    for pieces in episodes:
        parts = [(next(encoded), trained) for _, trained in pieces]
        ids.append([i for part, _ in parts for i in part][: args.length])
        mask.append([int(trained) for part, trained in parts for _ in part][: args.length])
    width = max(map(len, ids))
    pad = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids], dtype=torch.int16)
    return pad.numpy(), torch.tensor([row + [0] * (width - len(row)) for row in mask], dtype=torch.int8).numpy()


def _worker(seed: int, queue: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rng, rows = random.Random(seed), questions("train")
    while True:
        queue.put(make_batch(tokenizer, rows, rng, args))


def train(args: argparse.Namespace) -> None:
    """Supervised training, evaluated and saved at the end and at each of `--keep`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(args.out)
    demonstrate(questions("train")[0], random.Random(0), care=1, renaming=0)  # the index is built before the fork
    context = mp.get_context("fork")
    queue: Any = context.Queue(4 * args.workers)
    workers = [
        context.Process(target=_worker, args=(i + 1, queue, tokenizer, args), daemon=True) for i in range(args.workers)
    ]
    for w in workers:
        w.start()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(tokenizer).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05, fused=device == "cuda"
    )
    test, began, tokens = questions("test", limit=args.eval), time.time(), 0
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / args.lr_warmup) * max(args.lr_floor, 1 - step / args.steps)
        ids, mask = (torch.from_numpy(x).long().to(device) for x in queue.get())
        tokens += ids.numel()
        with torch.autocast(device, torch.bfloat16):
            logits = model(ids[:, :-1]).logits
        target = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f} {time.time() - began:.0f} s {tokens / 1e6:.0f} Mtok", flush=True)
        if step in args.keep or step == args.steps:
            report = {f"T={t:g}": evaluate(model, tokenizer, test, t) for t in (0.0, 1.0)}
            print(
                args.tag,
                "step",
                step,
                json.dumps({k: {n: round(x, 3) for n, x in v.items()} for k, v in report.items()}),
                flush=True,
            )
            model.train()
            save(model, args.out, args.out if step == args.steps else Path(f"{args.out}_{step}"))
    for w in workers:
        w.terminate()


def save(model: Any, source: Path, out: Path) -> None:
    """The checkpoint in bf16, with the tokenizer's files from `source`."""
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if source != out:
            shutil.copy(source / name, out / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tag", default="warmup")
    parser.add_argument("--tokenizer-only", action="store_true")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--keep", type=int, nargs="*", default=[])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--lr-warmup", type=int, default=200)
    parser.add_argument("--lr-floor", type=float, default=0.05)
    parser.add_argument("--care", type=float, default=0.3)
    parser.add_argument("--renaming", type=float, default=0.8)
    parser.add_argument("--skip-one-hop", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--eval", type=int, default=400)
    options = parser.parse_args()
    make_tokenizer(options.out, options.vocabulary) if options.tokenizer_only else train(options)
