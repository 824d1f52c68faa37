"""Training while episodes go on: nothing lost or counted twice, exact continuation, the same weights from the record.

The runs play on a virtual clock with the whole loop of `agentrl train` over a scripted engine, tools that take time and a trainer that does.
"""

import asyncio
import json
import random
import shutil
from collections import Counter

import pytest
from doubles import call

from agentrl import Task, ToolEnv, reward, tool
from agentrl.config import build_config
from agentrl.engine.scripted import ScriptedEngine
from agentrl.errors import ConfigError, TooManyFailuresError, UsageError
from agentrl.run import components as assemble
from agentrl.run import report
from agentrl.run.generation_gate import GenerationGate
from agentrl.run.train_only import train_only
from agentrl.run.training import train
from agentrl.schedule.virtual_clock import run_virtual, spend
from agentrl.store import read_records

TRAIN_S = 5.0
BASE = {
    "env": f"{__file__}:Slow",
    "num_rollout": 6,
    "rollout_batch_size": 3,
    "n_samples_per_prompt": 2,
    "eval_interval": 0,
    "tensorboard": False,
    "save_interval": 3,
    "keep_checkpoints": 0,
    "episode_timeout_s": 3600.0,
    "schedule": "async",
    "async_buffer_size": 7,
    "consumption_window": 3,
    "use_tis": True,
}


@reward
async def odd(trajectory):
    return float(trajectory.index % 2)


class Slow(ToolEnv):
    """A tool with a long tail."""

    action_format = "hermes"
    shows_tools = True
    rewards = (odd,)

    @classmethod
    def tasks(cls, split):
        return [Task(f"{split}{i}", f"question {i}") for i in range(20 if split == "train" else 2)]

    @tool(timeout_s=1000)
    async def look(self, query: str) -> str:
        """Look something up."""
        await asyncio.sleep(random.Random(query).lognormvariate(1.0, 1.0))
        return "nothing"


class Down(Slow):
    """Whatever its tool asks is down."""

    @tool(timeout_s=1000)
    async def look(self, query: str) -> str:
        """Look something up."""
        raise ConnectionRefusedError(111, "refused")


class Engine(ScriptedEngine):
    """Calls a tool twice, then answers; or what `says` returns for a request."""

    def __init__(self, components, keep=True, fails=False, says=None):
        def calls(request):
            if fails:
                raise RuntimeError("the engine is down")
            session = request.session.rpartition("/")[2].partition("-")[0]
            return "done" if request.number == 2 else call("look", query=f"{session} {request.number}")

        tokenizer = components.tokenizer
        super().__init__(
            says or calls, encode=tokenizer.encode, decode=tokenizer.decode, delay_s=1.0, keep_interrupted=keep
        )


class Trainer:
    """Its weights are the sum of what it was given, in order."""

    copies, micro_batch_tokens, micro_batch_rows, multiple, tree_packing = 1, 1 << 14, None, 1, False
    adapters = ()

    def __init__(self, crash_after=None):
        self.weights, self.fed, self.crash_after = 0.0, [], crash_after

    def step(self, rows, loss, lr):
        spend(TRAIN_S)
        if len(self.fed) == self.crash_after:
            raise KeyboardInterrupt
        self.fed.append([r.source for r in rows])
        for row in rows:
            self.weights = self.weights * 0.9 + float((row.weights * row.advantages * row.tokens).sum()) * lr
        return {"loss": 0.0, "log_probs": [r.rollout_log_probs for r in rows]}

    def log_probs(self, rows, **_):
        return [r.rollout_log_probs for r in rows]

    def export_weights(self, path):
        spend(0.5)
        path.mkdir(parents=True)
        (path / "weights").write_text(repr(self.weights))

    def save(self, path):
        path.mkdir(parents=True)
        (path / "weights").write_text(repr(self.weights))

    def load(self, path):
        self.weights = float((path / "weights").read_text())

    def close(self): ...


@pytest.fixture
def play(tokenizer_dir, tmp_path, monkeypatch):
    """Play a run, a resumed run or a replay; returns its folder, its trainer and its engine."""
    model = tmp_path / "model"
    shutil.copytree(tokenizer_dir, model)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    components = assemble.Components

    async def nothing(*_): ...

    monkeypatch.setattr(components, "require_trainable", lambda self: None)
    monkeypatch.setattr(components, "require_env", nothing)
    monkeypatch.setattr(report, "draw_curve", lambda *_: None)

    def run(name="run", *, trainer=None, engine=None, job=train, **settings):
        trainer = trainer or Trainer()
        made = []

        def make_engine(self, *_):
            made.append(Engine(self, **(engine or {})))
            return made[0]

        monkeypatch.setattr(components, "engine", make_engine)
        monkeypatch.setattr(components, "trainer", lambda self, path, *, reference: trainer)
        options = {"resume": tmp_path / name} if settings.pop("resume", False) else {}
        config = build_config(BASE | {"run": str(tmp_path / name), "hf_checkpoint": str(model), "lr": 0.01}, settings)
        lines = []
        work = job(config, echo=lines.append, **options) if job is train else job(config, echo=lines.append)
        run_virtual(work)
        return tmp_path / name, trainer, made[0], lines

    return run


def trained(folder):
    return [r for r in read_records(folder / "episodes") if r.get("split") == "train"]


def test_nothing_is_lost_or_counted_twice_and_every_sample_is_within_the_bound(play):
    folder, trainer, engine, lines = play()
    records = trained(folder)
    assert sorted(r["index"] for r in records) == list(range(36)), "every episode once, none dropped"
    assert Counter(r["step"] for r in records) == dict.fromkeys(range(6), 6)
    assert max(r["schedule"]["staleness"] for r in records) == 2
    assert any("no sample is older than 2 rollouts" in line for line in lines)
    assert any(line.startswith("groups by staleness in rollouts (bound 2)") for line in lines)
    assert any("busy: " in line and "engine" in line and "weight sync" in line for line in lines)
    assert {e["cat"] for e in json.loads((folder / "timeline.json").read_text())["traceEvents"]} >= {
        "engine",
        "trainer",
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["exactness_violations"] for row in rows} == {0}
    assert max(row["schedule/version_lag_max"] for row in rows) <= 2
    assert engine.policy_version == 6
    assert len(trainer.fed) == 6


def test_interrupted_generations_have_tokens_of_several_versions(play):
    folder, *_ = play()
    turns = [
        {s["policy_version"] for s in segment["spans"] if s["turn"] == turn["index"] and "policy_version" in s}
        for r in trained(folder)
        for segment in r["segments"]
        for turn in r["turns"]
    ]
    assert any(len(versions) > 1 for versions in turns)


def test_train_only_on_the_record_gives_the_same_weights(play):
    folder, trainer, *_ = play()
    _, again, *_ = play("again", job=lambda config, echo: train_only(config, folder, echo=echo))
    assert again.fed == trainer.fed
    assert again.weights == trainer.weights != 0
    assert len({tuple(sorted(int(i.partition("-")[0]) for i, _ in step)) for step in trainer.fed}) == 6


def test_a_resumed_run_continues_with_its_groups_and_plays_none_again_that_had_finished(play, tmp_path):
    crashing = Trainer(crash_after=4)
    with pytest.raises(KeyboardInterrupt):
        play(trainer=crashing)
    checkpoint = tmp_path / "run" / "checkpoints" / "000003"
    lines = [json.loads(line) for line in (checkpoint / "buffer.jsonl").read_bytes().splitlines()]
    finished = {r["episode_id"] for r in lines if r["kind"] == "episode"}
    slots = [r for r in lines if r["kind"] == "slot"]
    assert len(slots) == 7
    assert any("attempts" not in slot for slot in slots), "some groups were in flight"
    assert finished, "some waited to be trained on"
    folder, trainer, engine, _ = play(resume=True)
    records = trained(folder)
    assert sorted(r["index"] for r in records) == list(range(36))
    assert not finished & {request.session for request in engine.requests}
    assert len(trainer.fed) == 3
    assert crashing.fed[:3] + trainer.fed == [
        [(r["episode_id"], 0) for r in sorted(records, key=lambda r: r["index"]) if r["step"] == step]
        for step in range(6)
    ]


def test_a_checkpoint_with_groups_in_flight_is_not_continued_with_another_schedule(play):
    with pytest.raises(KeyboardInterrupt):
        play(trainer=Trainer(crash_after=4))
    for other in (
        {"async_buffer_size": 9},
        {"schedule": "sync", "async_buffer_size": None, "consumption_window": None},
    ):
        with pytest.raises(ConfigError, match="resume with the same schedule"):
            play(resume=True, **other)


def test_no_deadlock_when_every_engine_is_down(play):
    with pytest.raises(TooManyFailuresError, match="the engine is down"):
        play(engine={"fails": True})


def test_case_30_when_every_tool_call_fails_the_run_stops_with_the_table_of_causes(play):
    with pytest.raises(TooManyFailuresError, match=r"tool_failure +\d+ +tool look: ConnectionRefusedError"):
        play(env=f"{__file__}:Down")


def test_an_evaluation_beside_training_sees_one_version_and_stops_no_rollout(play):
    folder, _, engine, _ = play(eval_interval=2)
    evaluated = [r for r in read_records(folder / "episodes") if r["split"].startswith("eval/")] if folder else []
    by_step = {r["step"]: set() for r in evaluated}
    for r in evaluated:
        by_step[r["step"]] |= {
            s["policy_version"] for seg in r["segments"] for s in seg["spans"] if "policy_version" in s
        }
    assert by_step == {0: {0}, 2: {2}, 4: {4}, 6: {6}}
    sessions = [request.session.startswith("eval/") for request in engine.requests]
    first, last = sessions.index(True), len(sessions) - sessions[::-1].index(True)
    assert not all(sessions[first:last]), "episodes of training were played between those of an evaluation"


def test_without_partial_rollout_no_generation_is_interrupted(play):
    folder, *_ = play(partial_rollout=False, engine={"keep": True})
    for r in trained(folder):
        for turn in r["turns"]:
            spans = r["segments"][turn["segment"]]["spans"]
            assert len([s for s in spans if s["turn"] == turn["index"] and s["provenance"] == "SAMPLED"]) == 1


def test_a_closed_gate_waits_for_generations_in_flight_and_holds_new_ones_back():
    async def check():
        log = []

        class Generator:
            async def generate(self, ids, sampling, *, session, images=()):
                await asyncio.sleep(2)
                log.append(session)

        gate = GenerationGate(Generator())
        first = asyncio.create_task(gate.generate([], None, session="a"))
        await asyncio.sleep(1)
        async with gate.closed():
            log.append("closed")
            second = asyncio.create_task(gate.generate([], None, session="b"))
            await asyncio.sleep(5)
        await asyncio.gather(first, second)
        return log

    assert run_virtual(check()) == ["a", "closed", "b"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_buffer_size": 2}, "can never fill"),
        ({"consumption_window": 9}, "larger than the buffer"),
        ({"max_staleness": 1}, "a sample may be 2 rollouts old"),
        ({"dynamic_sampling_filter_path": "nonsense"}, "unknown group filter"),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused_before_anything_starts(play, tmp_path, settings, message):
    with pytest.raises(UsageError, match=message):
        play(**settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "async", "engine": "sglang", "colocate": True}, "leave out --colocate"),
        ({"schedule": "async", "engine": "sglang", "runner_processes": 2}, "leave out --runner-processes"),
        ({"schedule": "async", "rollout_function_path": "a.b"}, "plays whole rollouts itself"),
        ({"async_buffer_size": 9}, "has no effect with --schedule sync"),
        ({"update_weights_interval": 2}, "has no effect with --schedule sync"),
        ({"max_resamples": 2}, "without --dynamic-sampling-filter-path"),
    ],
)
def test_settings_that_contradict_a_schedule_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_config(settings)
