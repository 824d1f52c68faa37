"""How the embedded policy was made: scripted episodes, recorded by the ordinary runner, then `agentrl sft` (minutes on a GPU).

    python examples/search_r1/warmup.py init START
    python examples/search_r1/warmup.py record EPISODES --model START --episodes 128000 --processes 15
    agentrl sft EPISODES/* --config examples/search_r1/warmup.toml --hf-checkpoint START --run RUN --dtype bfloat16    # weights in RUN/hf

The demonstrator knows the format and copies exactly, but searches with care only some of the time: otherwise it types the words of the
question, also where the question takes two searches, and gives up with 'unknown' when that finds nothing. In 80 % of the episodes the
country is disguised (other names, other numbers), so copying is learned and the facts are not. What pays is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import random
from collections.abc import Iterator
from dataclasses import replace
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

CARE, RENAMING, GIVE_UP = 0.3, 0.8, "unknown"


class Demonstrator:
    """Decides, turn by turn, what the expert writes about one question. Without `disguise` it sees real names."""

    def __init__(self, row: dict, rng: random.Random) -> None:
        self.record = factbook.records()[row["metadata"]["country"]]
        self.field = factbook.FIELDS[row["metadata"]["field"]]
        self.disguise = factbook.Renaming(rng, self.record) if rng.random() < RENAMING else None
        self.answer = row["golden_answers"][0]
        self.careful = list(factbook.expert_plan(row).queries)
        self.subject = self.record.name if row["metadata"]["hops"] == 1 else self.record.facts["capital"][0]
        self.rng, self.failed, self.searches, self.takes_care = rng, False, 0, False
        self.reply: str | None = None

    def told(self, text: str) -> str:
        """The text as this episode's policy may see it."""
        return self.disguise.apply(text) if self.disguise else text

    def write(self) -> str:
        """The next turn: a search or the answer."""
        if self.reply is not None:
            return f"<answer> {self.told(self.reply)}</answer>"
        self.searches += 1
        self.takes_care = self.failed or self.rng.random() < CARE
        query = self.careful[0] if self.takes_care else f"{self.subject} {self.field.label}"
        return f"<search> {self.told(query)}</search>"

    def read(self, found: str) -> None:
        """See the (real) passages found, and decide how to go on."""
        lines = found.splitlines()
        target = f"- {self.record.name} - {self.field.path[1]}: "
        bridge = f"- {self.record.name} - Capital: name: {self.record.facts['capital'][0]}"
        if any(line.startswith(target) and self.answer in line for line in lines):
            self.reply = self.answer
        elif self.takes_care and len(self.careful) == 2 and any(line.startswith(bridge) for line in lines):
            self.careful, self.subject, self.failed = self.careful[1:], self.record.name, False
        elif self.takes_care or self.rng.random() >= CARE:
            self.reply = GIVE_UP
        else:
            self.failed = True
        if self.searches == 3 and self.reply is None:
            self.reply = GIVE_UP


class Disguised(SearchR1):
    """search_r1 in which one country goes by other names."""

    def reset(self, task: Task, *, seed: int) -> str:
        """The question, disguised."""
        self.demonstrator: Demonstrator = task.metadata["demonstrator"]
        return self.demonstrator.told(str(task.prompt))

    @tool
    def search(self, query: str) -> str:
        """Search the real corpus for what the disguised query means, and disguise what is found."""
        d = self.demonstrator
        found = super().search(d.disguise.invert(query) if d.disguise else query)
        d.read(found)
        return d.told(found)


def specs(first: int, count: int) -> Iterator[tuple[EpisodeSpec, Demonstrator]]:
    """Episodes about training questions, each drawn by its own ordinal."""
    rows = factbook.questions("train")
    for index in range(first, first + count):
        rng = random.Random(index)
        row = rng.choice(rows)
        demonstrator = Demonstrator(row, rng)
        task = Task(row["id"], row["question"], row["golden_answers"], {"demonstrator": demonstrator})
        yield EpisodeSpec(task, index, index), demonstrator


def texts(count: int) -> Iterator[str]:
    """What the tokenizer learns from: demonstrations as plain text."""
    search = SearchR1().search
    for spec, d in specs(-count, count):
        text = d.told(str(spec.task.prompt))
        while d.reply is None:
            query = d.write()
            found = search(d.disguise.invert(query[9:-9]) if d.disguise else query[9:-9])
            d.read(found)
            text += f"{query}\n{d.told(found)}\n"
        yield text + d.write()


async def record(out: Path, model: Path, first: int, count: int, chunk: int = 512) -> None:
    """Run and write `count` episodes in the order of their ordinals."""
    tokenizer = Tokenizer.load(model)
    renderer = make_renderer(tokenizer, "search_r1")
    writer = EpisodeWriter(out)
    for start in range(first, first + count, chunk):
        batch = list(specs(start, min(chunk, first + count - start)))
        experts = {spec.episode_id: d for spec, d in batch}

        def script(request: ScriptedRequest, experts: dict[str, Demonstrator] = experts) -> str:
            return experts[request.session].write()

        engine = ScriptedEngine(script, encode=tokenizer.encode, decode=tokenizer.decode, demonstration=True)
        limits = Limits(max_turns=4, max_response_tokens=480, context_length=512)
        sampling = SamplingParams(max_new_tokens=1)
        runner = EpisodeRunner(
            make_env=Disguised,
            env_class=Disguised,
            engine=engine,
            renderer=renderer,
            scorer=Scorer([]),
            limits=limits,
            sampling=sampling,
            seed=0,
            pools=ThreadPools(Disguised),
        )
        groups, table = await Rollout(runner, RolloutLimits(concurrency=64, min_group_size=1)).run(
            [spec] for spec, _ in batch
        )
        runner.close()
        if table.failures:
            raise SystemExit(str(table))
        for group in groups:
            t = group.trajectories[0]
            writer.write(replace(t, task=replace(t.task, metadata={})))  # the demonstrator is no JSON value
    writer.close()


def _record(args: tuple[Path, Path, int, int]) -> None:
    asyncio.run(record(*args))


def main() -> None:
    """Run one of the two commands."""
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
        for done, _ in enumerate(pool.imap_unordered(_record, jobs), 1):
            print(f"{done} of {len(jobs)} parts recorded", flush=True)


if __name__ == "__main__":
    main()
