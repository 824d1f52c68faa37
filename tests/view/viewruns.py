"""Run folders for the page's tests, with texts that try to inject scripts."""

import json
from pathlib import Path

from doubles import OBSERVATION, PROMPT, SAMPLED, span, trajectory

from agentrl.store import EpisodeWriter, to_record
from agentrl.store.episode_files import index_of
from agentrl.store.episode_index import index_entry, write_entry
from agentrl.store.episode_record import encode
from agentrl.types import Action, Observation, Provenance, StopReason, ToolCall, ToolResult, Turn

EVIL = (
    '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1"></pre></script>\x1b[31mred\x07 \u202ereversed'
    "<!--<script>{{constructor}} ' \" ` &lt; \u2028end"
)
"""a possible result of a tool"""
WORDS = [
    "<|im_start|>",
    "What",
    " is",
    " it",
    "?\n",
    "<search>",
    " Paris",
    "</search>",
    "<information>",
    EVIL,
    "</information>",
    "<answer>",
    " yes",
    "</answer>",
]
"""the vocabulary: one word per id"""


def decode(ids):
    return "".join(WORDS[i] for i in ids)


def episode(index: int, group: int, score: float, reason=StopReason.TERMINATED, version: int = 2):
    """Two turns: a search, answered with EVIL, then an answer."""
    call = Action(
        "<search> Paris</search>",
        (ToolCall("search", {"query": "Paris"}, "c0"),),
        results=(ToolResult("c0", "search", EVIL, duration_s=0.125),),
    )
    turns = [
        Turn(
            0,
            0,
            5,
            call,
            Observation(({"role": "tool", "content": EVIL},)),
            matched_stop="</search>",
            timings={"generate_s": 0.25, "tools_s": 0.125, "env_s": 0.001},
        ),
        Turn(
            1,
            0,
            11,
            Action("<answer> yes</answer>", answer="yes"),
            reward=0.0,
            info={"note": EVIL},
            timings={"generate_s": 0.1, "env_s": 0.001},
        ),
    ]
    spans = [
        span(PROMPT, (0, 1, 2, 3, 4), -1),
        span(SAMPLED, (5, 6, 7), 0, version),
        span(Provenance.TEMPLATE, (8,), 0),
        span(OBSERVATION, (9,), 0),
        span(Provenance.TEMPLATE, (10,), 0),
        span(SAMPLED, (11, 12, 13), 1, version + 1),
    ]
    return trajectory(
        [spans],
        index=index,
        group=group,
        score=score,
        reason=reason,
        turns=turns,
        timings={"episode_s": 0.5},
        cause=EVIL if reason is StopReason.ENV_FAILURE else None,
    )


def step_record(index: int, step: int):
    """The step record of the two episodes of a group."""
    row = {"segment_index": 0, "tokens": 14, "trained": 6, "weight": 1 / 12, "old_log_probs": [-0.5] * 6}
    rows = [
        {**row, "episode_id": f"{index}-0", "advantage": 0.7071},
        {**row, "episode_id": f"{index + 1}-0", "advantage": -0.7071},
    ]
    return {
        "step": step,
        "optimizer_step": step + 1,
        "lr": 1e-5,
        "loss": {"kind": "policy"},
        "rows": rows,
        "plan": [[[0, 1]]],
        "micro_batch_tokens": 64,
        "metrics": {"loss": 0.25, "grad_norm": 1.5},
    }


def make_run(folder: Path, groups: int = 6) -> EpisodeWriter:
    """A run folder of two episodes a group; the writer is left open."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("# agentrl\n[run]\nseed = 0\n")
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "reward": s / 8, "train/loss": -s / 4}) + "\n" for s in range(groups))
    )
    writer = EpisodeWriter(folder / "episodes")
    for g in range(groups):
        add_group(writer, g)
    return writer


def add_group(writer: EpisodeWriter, g: int) -> None:
    """Add the group of rollout g, with its step record."""
    writer.write(episode(2 * g, g, 1.0), step=g, split="train", config="abcd")
    writer.write(
        episode(2 * g + 1, g, g / 10, StopReason.ENV_FAILURE if g == 3 else StopReason.MAX_TURNS),
        step=g,
        split="train",
        config="abcd",
    )
    writer.write_step(**step_record(2 * g, g))


def make_large_run(folder: Path, episodes: int) -> None:
    """A run of many episodes: one record many times, with different index entries."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    writer = EpisodeWriter(folder / "episodes")
    writer.close()
    data = folder / "episodes" / "000000.jsonl.zst"
    frame = writer._compressor.compress(encode(to_record(episode(0, 0, 1.0), step=0, split="train")))
    record = to_record(episode(0, 0, 1.0), step=0, split="train")
    with data.open("wb") as d, index_of(data).open("wb") as x:
        for i in range(episodes):
            d.write(frame)
            entry = index_entry(record, i * len(frame), len(frame))
            entry.id, entry.index, entry.group, entry.step, entry.score = (
                f"{i}-0",
                i,
                i // 8,
                i // 1024,
                (i * 7919 % 1000) / 1000,
            )
            x.write(write_entry(entry))
