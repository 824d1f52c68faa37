"""Recorded episodes for the tests of replay, rescore and fork: scripts, recording and replay."""

import asyncio
import dataclasses

from doubles import FakeGenerator, call, groups_of, make_runner
from lookup import Search, exact

from agentrl import ToolEnv, tool
from agentrl.cli.main import main
from agentrl.replay.replayer import Tally, replay_group
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.store import EpisodeWriter, read_episodes


class Hermes(Search):
    action_format = "hermes"


def script(request):
    """Turn by turn; a little different from episode to episode, so that groups are no copies."""
    word = "Paris" if request.random.random() < 0.5 else "Rome"
    return (
        f"<think>?</think><search>capital {word}</search>",
        "<search>France</search>",
        f"<answer> {word} </answer>",
    )[min(request.turn, 2)]


def hermes_script(request):
    return (call("search", query="capital"), call("search", query="France"), "<answer>Paris</answer>")[
        min(request.turn, 2)
    ]


async def record(env, engine, renderer, folder, **more):
    """A small rollout, written and read."""
    runner = make_runner(env, engine, renderer, rewards=env.rewards, **more)
    groups, _ = await Rollout(runner, RolloutLimits(max_retries=0)).run(groups_of(3, 2))
    runner.close()
    writer = EpisodeWriter(folder)
    for g in groups:
        for t in g.trajectories:
            writer.write(t, step=0, split="train")
    writer.close()
    return list(read_episodes(folder))


async def replay(env, renderer, episodes, live=(), **more):
    """Replay whole groups; the outcomes in order."""
    more.setdefault("rewards", env.rewards)
    runner = make_runner(env, FakeGenerator(renderer, []), renderer, **more)
    by_group = {}
    for t in episodes:
        by_group.setdefault(t.group_index, []).append(t)
    try:
        return [o for group in by_group.values() for o in await replay_group(runner, group, live)]
    finally:
        runner.close()


def differences(outcomes):
    return [o.divergence for o in outcomes]


def where(d):
    return d.cause, d.turn, d.token


def tally(outcomes):
    made = Tally()
    made.add(outcomes)
    return made


class Guess(ToolEnv):
    """Its tool changes it: what `step` says depends on a call that was made."""

    action_format = "search_r1"
    rewards = (exact,)
    hits = 0

    @tool
    def search(self, query: str) -> str:
        """Look something up."""
        self.hits += 1
        return f"{self.hits}"

    async def step(self, action):
        result = await super().step(action)
        return dataclasses.replace(result, reward=float(self.hits), terminated=self.hits == 2)


def token_within(tokenizer, ids, text):
    """Index of the token in which `text` begins."""
    at = tokenizer.decode(ids).index(text)
    return next(i for i in range(len(ids)) if len(tokenizer.decode(ids[: i + 1])) > at)


def span_at(t, turn, provenance):
    """Index of the first token of a span in an episode of one segment."""
    at = 0
    for s in t.segments[0].spans:
        if (s.turn, s.provenance) == (turn, provenance):
            return at
        at += len(s.ids)
    raise AssertionError(f"turn {turn} has no {provenance}")


class NoteTrainer:
    """Notes what it is fed."""

    copies, micro_batch_tokens, micro_batch_rows, multiple, tree_packing = 1, 1 << 14, None, 1, True

    def __init__(self):
        self.fed = []

    def step(self, rows, loss, lr):
        self.fed.append(list(rows))
        return {"loss": 0.5, "grad_norm": 1.0, "log_probs": [r.rollout_log_probs for r in rows]}

    def save(self, path):
        path.mkdir(parents=True)

    def export_weights(self, path):
        path.mkdir(parents=True)

    def close(self): ...


async def command(*words):
    """A command of agentrl, in a thread: it runs an event loop of its own."""
    return await asyncio.to_thread(main, list(map(str, words)))
