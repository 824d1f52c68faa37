"""Train the embedded policy: record scripted episodes with the ordinary runner, then run `agentrl sft` (minutes on a GPU).

    python examples/search_r1/warmup.py init START
    python examples/search_r1/warmup.py record EPISODES --model START --episodes 128000 --processes 15
    agentrl sft EPISODES/* --config examples/search_r1/warmup.toml --hf-checkpoint START --run RUN --dtype bfloat16    # weights in RUN/hf

The demonstrator writes the format and copies exactly, but searches well only some of the time. Otherwise it searches for the words of the
question, even if the question needs two searches, and answers 'unknown' if that finds nothing. In 80 % of the episodes the country's names and
numbers are replaced, so the policy learns to copy and not the facts. Reinforcement learning has to find out which behaviour is rewarded.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import random
from collections.abc import Iterator
from pathlib import Path

from policy import make_model, make_tokenizer

from agentrl.engine.base import SamplingParams
from agentrl.engine.scripted import ScriptedEngine, ScriptedRequest
from agentrl.envs import factbook
from agentrl.envs.search_r1 import SearchR1
from agentrl.render import Tokenizer, make_renderer
from agentrl.reward import Scorer
from agentrl.rollout.env_instance import ThreadPools
from agentrl.rollout.episode import EpisodeRunner, Limits
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.store import EpisodeWriter
from agentrl.tool import tool
from agentrl.types import EpisodeSpec, Task

GOOD_SEARCH, RENAMED, GIVE_UP = 0.3, 0.8, "unknown"
"""Share of good searches, share of episodes with replaced names, and the answer of a demonstrator that gives up."""


class Demonstrator:
    """Writes the turns of one episode. `renaming` replaces the country's names; None: the real names are used."""

    def __init__(self, row: dict, rng: random.Random) -> None:
        self.record = factbook.records()[row["metadata"]["country"]]
        self.field = factbook.FIELDS[row["metadata"]["field"]]
        self.renaming = factbook.Renaming(rng, self.record) if rng.random() < RENAMED else None
        self.answer = row["golden_answers"][0]
        self.good_queries = list(factbook.expert_plan(row).queries)
        self.subject = self.record.name if row["metadata"]["hops"] == 1 else self.record.facts["capital"][0]
        self.rng, self.failed, self.searches, self.searches_well = rng, False, 0, False
        self.reply: str | None = None

    def renamed(self, text: str) -> str:
        """Return a text with the names of this episode."""
        return self.renaming.apply(text) if self.renaming else text

    def original(self, query: str) -> str:
        """Return a query with the real names."""
        return self.renaming.invert(query) if self.renaming else query

    def write(self) -> str:
        """Return the next turn: a search or the answer."""
        if self.reply is not None:
            return f"<answer> {self.renamed(self.reply)}</answer>"
        self.searches += 1
        self.searches_well = self.failed or self.rng.random() < GOOD_SEARCH
        query = self.good_queries[0] if self.searches_well else f"{self.subject} {self.field.label}"
        return f"<search> {self.renamed(query)}</search>"

    def read(self, passages: str) -> None:
        """Decide how to continue after reading the passages, which have the real names."""
        lines = passages.splitlines()
        target = f"- {self.record.name} - {self.field.path[1]}: "
        bridge = f"- {self.record.name} - Capital: name: {self.record.facts['capital'][0]}"
        if any(line.startswith(target) and self.answer in line for line in lines):
            self.reply = self.answer
        elif self.searches_well and len(self.good_queries) == 2 and any(line.startswith(bridge) for line in lines):
            self.good_queries, self.subject, self.failed = self.good_queries[1:], self.record.name, False
        elif self.searches_well or self.rng.random() >= GOOD_SEARCH:
            self.reply = GIVE_UP
        else:
            self.failed = True
        if self.searches == 3 and self.reply is None:
            self.reply = GIVE_UP


DEMONSTRATORS: dict[int, Demonstrator] = {}  # by the index of the episode: tasks are copied, so they cannot hold them


class RenamedSearchR1(SearchR1):
    """search_r1 with replaced names of one country."""

    def reset(self, task: Task, *, seed: int) -> str:
        self.demonstrator = DEMONSTRATORS[task.metadata["index"]]
        return self.demonstrator.renamed(str(task.prompt))

    @tool
    def search(self, query: str) -> str:
        """Search the corpus."""
        passages = super().search(self.demonstrator.original(query))
        self.demonstrator.read(passages)
        return self.demonstrator.renamed(passages)


def specs(first: int, count: int) -> Iterator[tuple[EpisodeSpec, Demonstrator]]:
    """Yield episodes about training questions. Each draws its question by its index."""
    rows = factbook.questions("train")
    for index in range(first, first + count):
        rng = random.Random(index)
        row = rng.choice(rows)
        demonstrator = Demonstrator(row, rng)
        task = Task(row["id"], row["question"], row["golden_answers"], {"index": index})
        yield EpisodeSpec(task, index, index), demonstrator


def texts(count: int) -> Iterator[str]:
    """Yield demonstrations as plain text, to train the tokenizer."""
    search = SearchR1().search
    for spec, demonstrator in specs(-count, count):
        text = demonstrator.renamed(str(spec.task.prompt))
        while demonstrator.reply is None:
            turn = demonstrator.write()
            passages = search(demonstrator.original(turn.removeprefix("<search> ").removesuffix("</search>")))
            demonstrator.read(passages)
            text += f"{turn}\n{demonstrator.renamed(passages)}\n"
        yield text + demonstrator.write()


async def record(out: Path, model: Path, first: int, count: int, chunk: int = 512) -> None:
    """Run and record `count` episodes in the order of their indices."""
    tokenizer = Tokenizer.load(model)
    renderer = make_renderer(tokenizer, "search_r1")
    writer = EpisodeWriter(out)
    for start in range(first, first + count, chunk):
        batch = list(specs(start, min(chunk, first + count - start)))
        DEMONSTRATORS.update((spec.index, demonstrator) for spec, demonstrator in batch)

        def script(request: ScriptedRequest) -> str:
            return DEMONSTRATORS[int(request.session.partition("-")[0])].write()

        engine = ScriptedEngine(script, encode=tokenizer.encode, decode=tokenizer.decode, demonstration=True)
        env = {"make_env": RenamedSearchR1, "env_class": RenamedSearchR1, "pools": ThreadPools(RenamedSearchR1)}
        limits = Limits(max_turns=4, max_response_tokens=480, context_length=512)
        parts = {"engine": engine, "renderer": renderer, "scorer": Scorer([]), "limits": limits}
        runner = EpisodeRunner(**env, **parts, sampling=SamplingParams(max_new_tokens=1), seed=0)
        groups, table = await Rollout(runner, RolloutLimits(concurrency=64, min_group_size=1)).run(
            [spec] for spec, _ in batch
        )
        runner.close()
        if table.failures:
            raise SystemExit(str(table))
        for group in groups:
            writer.write(group.trajectories[0])
    writer.close()


def _record(args: tuple[Path, Path, int, int]) -> None:
    asyncio.run(record(*args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init")
    init.add_argument("out", type=Path)
    rec = commands.add_parser("record")
    rec.add_argument("out", type=Path)
    rec.add_argument("--model", type=Path, required=True)
    rec.add_argument("--episodes", type=int, default=128_000)
    rec.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.command == "init":
        make_tokenizer(args.out, texts(20_000))
        make_model(args.out)
        return
    share = -(-args.episodes // args.processes)
    jobs = [
        (args.out / f"part{i:02d}", args.model, i * share, min(share, args.episodes - i * share))
        for i in range(args.processes)
    ]
    with mp.get_context("spawn").Pool(args.processes) as pool:
        for count, _ in enumerate(pool.imap_unordered(_record, jobs), 1):
            print(f"{count} of {len(jobs)} parts recorded", flush=True)


if __name__ == "__main__":
    main()
