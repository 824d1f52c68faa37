"""Every setting reaches what it is for: rows, loss, learning rate, sampling, limits, groups, evaluation.

Each case plays a whole run over a scripted engine and a trainer that notes what it is given, once with the setting and once without.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import FakeEngine, call

from agentrl.config import FIELDS, SECTIONS, build_config
from agentrl.config.settings import TABLES
from agentrl.core.ports import free_port
from agentrl.engine.local import engine as local
from agentrl.engine.local import teacher
from agentrl.errors import AgentRLError, ConfigError, EngineFailure, NonFiniteError
from agentrl.render import Tokenizer, make_renderer
from agentrl.rollout.episode import EpisodeRunner
from agentrl.run import components as assemble
from agentrl.run import report
from agentrl.run.sft import sft
from agentrl.run.training import train
from agentrl.store import read_episodes, read_records
from agentrl.train.megatron import trainer as megatron
from agentrl.weight_sync.broadcast import BroadcastSync
from agentrl.weight_sync.colocated import ColocatedSync

ENV = Path(__file__).with_name("joint_env.py")
OLD, REFERENCE = -0.5, -0.25
"""what the trainer says of its own weights and of the reference's"""
TEMPLATE = (
    "{% if mood is defined %}<|im_start|>system\nbe {{ mood }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ strftime_now('%Y-%m-%d') }} {% endif %}"
)


class NotingTrainer:
    """Notes everything in the order in which it comes."""

    copies, micro_batch_tokens, micro_batch_rows, multiple, tree_packing = 1, 1 << 14, None, 1, True

    def __init__(self, model, **options):
        self.options = {"model": Path(model).name, **options}
        self.steps, self.events, self.profiled, self.exported, self.saved = [], [], [], [], 0
        self.trained = []

    def log_probs(self, rows, *, reference=False, trained_only=False, adapter=None):
        self.events.append("reference" if reference else "old")
        of = REFERENCE if reference else OLD - len(self.steps)  # its own weights change with every step
        return [np.where(r.weights > 0, np.float32(of), np.float32(0)) for r in rows]

    def values(self, rows):
        return [np.where(r.weights > 0, np.float32(0.25) * np.arange(len(r.tokens)) % 3, np.float32(0)) for r in rows]

    def offload(self): ...
    def onload(self): ...

    def step(self, rows, loss, lr, *, profile=None, adapter=None):
        self.trained.append((adapter, len(rows)))
        self.events.append("step")
        self.profiled.append(profile and profile.name)
        self.steps.append((list(rows), loss, lr))
        log_probs = {} if loss.kind == "value" else {"log_probs": [r.rollout_log_probs for r in rows]}
        return {"loss": 0.5, "grad_norm": 1.0, **log_probs}

    def save(self, path):
        self.saved += 1
        path.mkdir(parents=True)

    def begin_save(self, path):
        self.save(path)
        self.events.append("save begun")
        return lambda: self.events.append("save complete")

    def export_weights(self, path, *, adapter=None):
        path.mkdir(parents=True)
        self.exported.append((path.name, len(self.steps)))

    def export_adapter(self, path, *, adapter=None):
        path.mkdir(parents=True)

    def close(self): ...


class FixedTeacher:
    """Gives every token the same log-prob."""

    def __init__(self, folder, vocab_size): ...

    async def score(self, ids):
        return [-1.0] * (len(ids) - 1)

    async def close(self): ...


@dataclass
class Seen:
    """What a run did."""

    path: Path | None = None
    error: Exception | None = None
    trainer: Any = None
    critic: Any = None
    engine: Any = None
    engines: list[Any] = field(default_factory=list)
    engine_options: dict[str, Any] = field(default_factory=dict)
    runners: list[EpisodeRunner] = field(default_factory=list)
    episodes: list[Any] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def rows(self):
        return [r for rows, _, _ in self.trainer.steps for r in rows]

    def asked(self, *, held_out: bool = False):
        """Requests to the engine in training or in evaluations."""
        return [r for r in self.engine.requests if r.session.startswith("eval/") is held_out]

    @property
    def played(self):
        return [t for t in self.episodes if not t.episode_id.startswith("eval/")]

    @property
    def prompt(self):
        return self.engine.renderer.tokenizer.decode(self.asked()[0].ids)


# -- what the policy says ------------------------------------------------------------------------------------------------


def index_of(request):
    return int(request.session.rpartition("/")[2].partition("-")[0])


def says(request):
    """A call, then a number: more words and 3 in every second episode."""
    if request.turn == 0:
        return call("look", query="capital")
    return "it is surely 3" if index_of(request) % 2 else "is 0"


def half_cut(request):
    """Of four episodes two end after a turn, with 0 and 3; the others would go on."""
    return f"is {3 * (index_of(request) % 4 == 3)}" if index_of(request) % 2 else call("look", query="x")


def numbers(request):
    return f"is {index_of(request) % 2}"


def flat(request):
    return "is 1"


def garbage(request):
    return "<tool_call>{oops</tool_call>"


def calls_two(request):
    return says(request) if request.turn else call("look", query="a") + call("look", query="b")


def asks_for_much(request):
    return says(request) if request.turn else call("look", query="word " * 20)


async def slow(request):
    await asyncio.sleep(0.5 if request.turn else 0)
    return says(request)


def fails_at_first(request):
    return EngineFailure("503") if request.session.endswith("-0") else says(request)


def all_fail(request):
    return EngineFailure("503")


def odd_ones_fail(request):
    return EngineFailure("503") if index_of(request) % 2 else says(request)


async def first_group_is_slow(request):
    await asyncio.sleep(0.5 if index_of(request) < 2 else 0)
    return says(request)


# -- a run ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tokenizer_dir, tmp_path_factory):
    """Two model folders as far as they are looked at, and files of tasks and of conversations."""
    folder = tmp_path_factory.mktemp("joints")
    for name in ("model", "other"):
        shutil.copytree(tokenizer_dir, folder / name)
        (folder / name / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
        config = json.loads((folder / name / "tokenizer_config.json").read_text())
        (folder / name / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    rows = [
        {
            "id": f"f{i}",
            "prompt": f"p{i}",
            "label": f"l{i}",
            "q": f"q{i}",
            "a": f"a{i}",
            "m": {"k": 1},
            "t": [{"name": "f"}],
        }
        for i in range(3)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    turns = [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "yes it is"}]
    lines = [{"messages": [*turns, *turns[: 2 * (i % 2)]]} for i in range(6)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def play(model, monkeypatch, tmp_path):
    """Play a run with these settings."""
    renderer = make_renderer(Tokenizer.load(model / "model"), "hermes")
    monkeypatch.setattr(assemble.Components, "require_trainable", lambda self: None)
    monkeypatch.setattr(assemble.Components, "require_weights", lambda self: None)
    monkeypatch.setattr(assemble.Components, "require_critic", lambda self: None)
    for module in ("training", "sft"):
        monkeypatch.setattr(f"agentrl.run.{module}.describe_adapters", lambda *_: None)
    monkeypatch.setattr(teacher, "LocalTeacher", FixedTeacher)
    monkeypatch.setattr(report, "draw_curve", lambda *_: None)  # takes most of a run's time
    count = iter(range(1000))

    async def run(settings, script=says, job="train"):
        seen = Seen()

        def make_engine(folder, **options):
            seen.engines.append(FakeEngine(renderer, script, version=0))
            seen.engine = seen.engines[0]
            seen.engine_options = {"model": Path(folder).name, **options}
            return seen.engines[-1]

        def make_trainer(folder, **options):
            made = NotingTrainer(folder, **options)
            if options.get("critic"):
                seen.critic = made
            else:
                seen.trainer = made
            return made

        class Noted(EpisodeRunner):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                seen.runners.append(self)

        monkeypatch.setattr(local, "LocalEngine", make_engine)
        monkeypatch.setattr(megatron, "MegatronTrainer", make_trainer)
        monkeypatch.setattr(assemble, "EpisodeRunner", Noted)
        base = {
            "run": str(tmp_path / f"run{next(count)}"),
            "hf_checkpoint": str(model / "model"),
            "env": str(ENV),
            "num_rollout": 2,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "tensorboard": False,
            "eval_interval": 0,
        }
        placed = {k: _placed(v, {"MODEL": model, "RUN": tmp_path, "ENV": ENV}) for k, v in settings.items()}
        try:
            config = build_config(base, placed)
            if job == "sft":
                seen.path = await sft(config, [model / "talks.jsonl"], echo=lambda _: None)
            else:
                seen.path = await train(config, echo=lambda _: None)
        except AgentRLError as e:
            seen.error = e
            return seen
        seen.episodes = list(read_episodes(seen.path / "episodes"))
        seen.files = [str(p.relative_to(seen.path)) for p in sorted(seen.path.rglob("*"))]
        return seen

    return run


@pytest.fixture(scope="module")
def plain_runs():
    """Runs without the setting of a case, shared by those cases that have the same further settings."""
    return {}


def _placed(value, places):
    """With MODEL, RUN and ENV for the folders and files of this test."""
    if isinstance(value, (tuple, list)):
        return [_placed(v, places) for v in value]
    if not isinstance(value, str):
        return value
    for name, path in places.items():
        value = value.replace(name, str(path))
    return value


# -- the cases -----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """With `name` set to `value` the run shows `want`, without it something else."""

    name: str
    value: Any
    see: Callable[[Seen], Any]
    want: Any
    given: dict[str, Any] = field(default_factory=dict)
    """further settings, of both runs"""
    script: Callable[..., Any] = says
    job: str = "train"


def loss(name):
    return lambda s: getattr(s.trainer.steps[0][1], name)


def trainer(name):
    return lambda s: s.trainer.options[name]


def lora(name):
    return lambda s: getattr(s.trainer.options["lora"], name)


def engine(name):
    return lambda s: s.engine_options[name]


def sampling(name, *, held_out=False):
    return lambda s: {getattr(r.sampling, name) for r in s.asked(held_out=held_out)}


def sampling_first(s):
    return {r.sampling.max_new_tokens for r in s.asked(held_out=True) if r.turn == 0}


def rates(s):
    return [lr for _, _, lr in s.trainer.steps]


def advantages(s):
    """By ordinal, in the first optimizer step."""
    return {
        int(r.source[0].partition("-")[0]): round(float(r.advantages.sum() / (r.weights > 0).sum()), 3)
        for r in s.trainer.steps[0][0]
    }


def branches(s):
    """Trained rows of branches in the first step by their branching turn."""
    made = {t.episode_id: t.branch_turn for t in s.played if t.parent}
    return dict(Counter(made[r.source[0]] for r in s.trainer.steps[0][0] if r.source[0] in made))


def per_token(s):
    """Different weights of a token in the first step."""
    return len({float(w) for r in s.trainer.steps[0][0] for w in r.weights[r.weights > 0]})


def of_tokens(s):
    """Advantages of all trained tokens of the first step."""
    return np.concatenate([r.advantages[r.weights > 0] for r in s.trainer.steps[0][0]])


def varies_in_a_row(s):
    return any(len(set(r.advantages[r.weights > 0].tolist())) > 1 for r in s.trainer.steps[0][0])


def largest_advantage(s):
    return round(float(np.abs(of_tokens(s)).max()), 3)


def returns_vary(s):
    """Within an episode: with λ = 1 and γ = 1 the critic's target is the score everywhere."""
    row = s.critic.steps[0][0][0]
    return len(set(row.returns[row.weights > 0].tolist())) > 1


def old_are_the_engines(s):
    return all((r.old_log_probs == r.rollout_log_probs).all() for r in s.rows)


def evaluated(s):
    return sorted({r.session.rpartition("/")[0] for r in s.asked(held_out=True)})


def told_results(s):
    """The indices of the groups whose results the data source was given, rollout by rollout."""
    module = sys.modules[type(s.runners[0].make_env()).__module__]
    told, module.Noting.told = module.Noting.told, []
    return told


def eval_roles(s):
    return {t.roles for t in s.episodes if t.episode_id.startswith("eval/")}


def eval_questions(s):
    """Sessions of the first evaluation."""
    return len({r.session for r in s.asked(held_out=True) if r.session.split("/")[2] == "0"})


def tasks(s):
    return [t.task.id for t in s.played]


def error(s):
    return s.error and type(s.error).__name__


def turns(s):
    return {len(t.turns) for t in s.played}


def first_action(s):
    return s.played[0].turns[0].action


def told(s):
    """The address that agents were told, without a port that was chosen for them."""
    (url,) = {t.state["result"] for t in s.played}
    return url if url.endswith(f":{PORT}") else url.rpartition(":")[0]


PORT = free_port()
AGENT = {"env": str(ENV.with_name("joint_agent.py")), "num_rollout": 1}


def schedule_of(name):
    """Of the groups in the order in which they were trained on."""
    return lambda s: [
        r["schedule"][name] for r in read_records(s.path / "episodes") if "schedule" in r and r["index"] % 2 == 0
    ]


def engines_of_evaluations(s):
    return [any(r.session.startswith("eval/") for r in engine.requests) for engine in s.engines]


def trained_groups(s):
    return {int(r.source[0].partition("-")[0]) // 2 for r in s.rows}


def is_played_again(s):
    """Whether the task of the first group, which is stopped, is that of the first group of the second rollout."""
    first = {index_of(r): r.ids for r in s.asked() if r.turn == 0}
    return first[6] == first[0]


RANK4 = {"lora_rank": 4}
TEAMS = {"first": "red", "second": "blue"}
OVER_SAMPLED = {"over_sampling_batch_size": 3}
TWO = {"n_samples_per_prompt": 4, "rollout_batch_size": 1, "num_rollout": 1, "max_turns": 1}
DR = {"advantage_estimator": "dr_grpo"}
PAIR = ENV.with_name("joint_roles.py")
ROLES = {"env": str(PAIR)}
EVALUATED = {"eval_interval": 20}
FILE = {"prompt_data": "MODEL/tasks.jsonl"}
ASYNC = {"schedule": "async", "num_rollout": 4}
LOST = {"max_failure_share": 1.0, "max_retries": 0, "entropy_coef": 0.1}
CASES = [
    # run
    Case("run", "RUN/chosen", lambda s: s.path.name, "chosen"),
    Case("seed", 7, trainer("seed"), 7),
    Case("seed", 7, lambda s: {r.seed for r in s.runners}, {7}),
    Case("date", "2001-02-03", lambda s: "2001-02-03" in s.prompt, True),
    Case("save_interval", 1, lambda s: s.trainer.saved, 2),
    Case("keep_checkpoints", 1, lambda s: sum(f.endswith("/trainer") for f in s.files), 1, {"save_interval": 1}),
    Case("tensorboard", True, lambda s: any("events" in f for f in s.files), True),
    # model
    Case("hf_checkpoint", "MODEL/other", trainer("model"), "other"),
    Case("hf_checkpoint", "MODEL/other", engine("model"), "other"),
    Case("dtype", "bfloat16", trainer("dtype"), "bfloat16"),
    Case("template_args", {"mood": "kind"}, lambda s: "be kind" in s.prompt, True),
    # environment
    Case(
        "env_settings", {"gymnasium:FrozenLake-v1.max_turns": 1},
        lambda s: {len(t.turns) for t in s.played if t.env != "Joint"}, {1},
        {"env": "ENV:Joint=1 gymnasium:FrozenLake-v1=1"},
    ),
    Case("players", {"second": f"{PAIR}:echo"}, lambda s: {t.roles for t in s.played}, {("first",)}, ROLES, numbers),
    Case("env_args", {"bonus": 2.0}, lambda s: {t.score for t in s.episodes}, {4.0, 7.0}),
    Case("reward", ["ENV:one"], lambda s: {t.score for t in s.episodes}, {1.0, 4.0}),
    Case("reward_key", "b", lambda s: {t.score for t in s.episodes}, {2.0, 5.0}, {"reward": ["ENV:parts"]}),
    Case("action_format", "search_r1", lambda s: s.runners[0].renderer.format.name, "search_r1"),
    Case("tools_in_prompt", True, lambda s: '"name": "look"' in s.prompt, True),
    Case("max_turns", 1, turns, {1}),
    Case("max_invalid_actions", 1, turns, {1}, script=garbage),
    Case("max_calls_per_turn", 1, lambda s: len(first_action(s).results), 1, script=calls_two),
    Case("keep_whole_outputs", True, lambda s: any("/outputs/" in f for f in s.files), True, script=asks_for_much),
    Case("env_isolation", "process", lambda s: s.episodes[0].turns[0].info["pid"] == os.getpid(), False),
    Case("surplus_calls", "ignore", lambda s: len(first_action(s).errors), 0, {"max_calls_per_turn": 1}, calls_two),
    Case("history_policy", "rerender", lambda s: s.runners[0].renderer.history_policy, "rerender"),
    Case("context_policy", "drop_old_turns", lambda s: type(s.runners[0].context_policy).__name__, "DropOldTurns"),
    Case("context_policy_args", {"keep": 7}, lambda s: s.runners[0].context_policy.keep, 7, {"context_policy": "summarise"}),
    Case("raw_content", True, lambda s: s.asked()[0].ids.count(s.engine.renderer.end_id), 2),
    Case("truncated_episodes", "mask", advantages, {1: -0.75, 3: 2.25}, TWO | {"advantage_estimator": "dr_grpo"}, half_cut),
    Case("truncated_episodes", "drop", advantages, {1: -1.5, 3: 1.5}, TWO | {"advantage_estimator": "dr_grpo"}, half_cut),
    Case("save_debug_rollout_data", "RUN/linked", lambda s: (s.path.parent / "linked").resolve() == s.path / "episodes", True),
    # data
    Case("metadata_key", "m", lambda s: s.played[0].task.metadata, {"k": 1}, FILE),
    Case("tool_key", "t", lambda s: [t["function"]["name"] for t in s.played[0].task.metadata.get("tools", ())], ["f"], FILE),
    Case("prompt_data", "MODEL/tasks.jsonl", lambda s: set(tasks(s)) <= {"f0", "f1", "f2"}, True),
    Case("input_key", "q", lambda s: s.played[0].task.prompt[0], "q", FILE),
    Case("label_key", "a", lambda s: s.played[0].task.label[0], "a", FILE),
    Case("rollout_shuffle", False, tasks, [f"train{i}" for i in (0, 0, 1, 1, 2, 2, 3, 3)]),
    Case("data_limit", 1, lambda s: set(tasks(s)), {"train0"}),
    Case("data_limit", 1, lambda s: set(tasks(s)), {"f0"}, FILE),
    # rollout
    Case("num_rollout", 3, lambda s: len(s.trainer.steps), 3),
    Case("rollout_batch_size", 3, lambda s: len({r.source for r in s.trainer.steps[0][0]}), 6),
    Case("n_samples_per_prompt", 3, lambda s: [tasks(s).count(t) for t in tasks(s)[:1]], [3]),
    Case("branch_at", ["1"], branches, {1: 4}, {"num_rollout": 1}),
    Case("branch_samples", 2, branches, {1: 8}, {"num_rollout": 1, "branch_at": ["1"]}),
    Case("num_steps_per_rollout", 2, lambda s: [len(rows) for rows, _, _ in s.trainer.steps], [2, 2, 2, 2]),
    Case("rollout_temperature", 1.5, sampling("temperature"), {1.5}),
    Case("rollout_temperature", 1.5, lambda s: {float(t) for r in s.rows for t in r.temperature[r.weights > 0]}, {1.5}),
    Case("rollout_top_p", 0.9, sampling("top_p"), {0.9}, {"allow_truncated_sampling": True}),
    Case("rollout_top_k", 5, sampling("top_k"), {5}, {"allow_truncated_sampling": True}),
    Case("allow_truncated_sampling", True, error, None, {"rollout_top_k": 5}),
    Case("use_rollout_routing_replay", True, error, "ConfigError", {"num_rollout": 1}),
    Case("rollout_max_response_len", 200, lambda s: s.asked()[0].sampling.max_new_tokens, 200),
    Case("rollout_max_context_len", 600, engine("context_length"), 600),
    Case("rollout_max_context_len", 600, lambda s: len(s.asked()[0].ids) + s.asked()[0].sampling.max_new_tokens, 600),
    Case("max_tokens_per_turn", 150, sampling("max_new_tokens"), {150}),
    Case("concurrency", 1, lambda s: s.engine.most_running, 1),
    Case("episode_timeout_s", 0.1, lambda s: {t.stop_reason.value for t in s.played}, {"episode_timeout"}, {"num_rollout": 1}, slow),
    Case("max_retries", 1, lambda s: {t.attempt for t in s.episodes}, {0, 1}, {"num_rollout": 1, "max_failure_share": 1.0}, all_fail),
    Case("min_group_size", 1, lambda s: len(s.trainer.steps), 2, LOST, odd_ones_fail),
    Case("max_failure_share", 1.0, error, None, {"max_retries": 0}, odd_ones_fail),
    # gateway
    Case("gateway_host", "127.0.0.2", told, "http://127.0.0.2", AGENT),
    Case("gateway_port", PORT, told, f"http://127.0.0.1:{PORT}", AGENT),
    Case("gateway_url", f"http://localhost:{PORT}", told, f"http://localhost:{PORT}", AGENT | {"gateway_port": PORT}),
    # engine
    Case("engine_max_running", 3, engine("max_running"), 3),
    Case("threads", 3, engine("threads"), 3),
    Case("threads", 3, trainer("threads"), 3),
    # train
    Case("advantage_estimator", "dr_grpo", lambda s: set(advantages(s).values()), {-1.5, 1.5}),
    Case("advantage_estimator", "rloo", lambda s: set(advantages(s).values()), {-3.0, 3.0}),
    *[
        Case("advantage_estimator", name, loss("policy_loss"), kind, {"calculate_per_token_loss": False})
        for name, kind in {"gspo": "sequence", "cispo": "cispo"}.items()
    ],
    Case("true_on_policy_mode", True, engine("single_token_chunks"), True),
    Case("true_on_policy_mode", True, trainer("true_on_policy"), True),
    Case("true_on_policy_mode", True, trainer("tree_packing"), False),
    Case("true_on_policy_mode", True, lambda s: all(r.old_log_probs is r.rollout_log_probs for r in s.rows), True),
    Case("advantage_estimator", "ppo", lambda s: s.critic is not None, True),
    Case("gamma", 0.5, varies_in_a_row, True, {"advantage_estimator": "reinforce_plus_plus"}),
    Case("lambd", 0.5, returns_vary, True, {"advantage_estimator": "ppo"}),
    Case("gigpo_step_weight", 0.5, largest_advantage, 1.061, {"advantage_estimator": "gigpo"}),
    Case("eps_clip", 0.3, loss("eps_clip"), 0.3),
    Case("eps_clip_high", 0.4, loss("eps_clip_high"), 0.4),
    Case("eps_clip_c", 3.0, loss("eps_clip_c"), 3.0),
    Case("use_kl_loss", True, trainer("reference"), True),
    Case("use_kl_loss", True, lambda s: [r.ref_log_probs is None for r in s.rows], [False] * 8),
    Case("kl_loss_coef", 0.1, loss("kl_loss_coef"), 0.1, {"use_kl_loss": True}),
    Case("kl_loss_coef", 0.1, lambda s: len(s.trainer.steps), 2, {"use_kl_loss": True}, flat),
    Case("kl_loss_type", "k2", loss("kl_loss_type"), "k2", {"use_kl_loss": True}),
    Case("entropy_coef", 0.1, loss("entropy_coef"), 0.1),
    Case("entropy_coef", 0.1, lambda s: len(s.trainer.steps), 2, script=flat),
    Case("calculate_per_token_loss", True, per_token, 1),
    Case("calculate_per_token_loss", True, per_token, 1, job="sft"),
    Case("use_tis", True, loss("use_tis"), True),
    Case("tis_threshold", 3.0, loss("tis_threshold"), 3.0, {"use_tis": True}),
    Case("tis_level", "episode", lambda s: s.rows[0].importance_log_ratio is not None, True, {"use_tis": True}),
    Case("tis_mode", "mask", loss("tis_mode"), "mask", {"use_tis": True}),
    Case("tis_clip_low", 0.5, loss("tis_clip_low"), 0.5, {"use_tis": True}),
    Case("rejection_level", "token", lambda s: bool((of_tokens(s) == 0).any()), True),
    Case("rejection_low", 2.0, lambda s: len(s.trainer.steps), 0, {"rejection_level": "token"}),
    Case("rejection_high", 0.5, lambda s: len(s.trainer.steps), 0, {"rejection_level": "token"}),
    Case("proximal_log_probs", "rollout", old_are_the_engines, True, {"num_steps_per_rollout": 2}),
    Case("proximal_log_probs", "interpolate", lambda s: s.rows[0].proximal_weight is not None, True, {"num_steps_per_rollout": 2}),
    Case("kl_coef", 0.1, trainer("reference"), True),
    Case("kl_coef", 0.1, varies_in_a_row, True, {"advantage_estimator": "reinforce_plus_plus"}),
    Case("kl_loss_type", "k1", lambda s: largest_advantage(s) > 1.5, True, DR | {"kl_coef": 0.1}),
    Case("use_unbiased_kl", True, loss("use_unbiased_kl"), True, {"use_kl_loss": True}),
    Case("overlong_buffer_len", 1024, lambda s: largest_advantage(s) != 1.5, True, DR),
    Case("overlong_penalty_factor", 1000.0, lambda s: largest_advantage(s) > 2, True, DR | {"overlong_buffer_len": 1024}),
    Case("opd_teacher", ["MODEL/other"], varies_in_a_row, True),
    Case("opd_kl_coef", 100.0, lambda s: largest_advantage(s) > 20, True, {"opd_teacher": ["MODEL/other"]}),
    Case("critic_lr", 0.5, lambda s: s.critic.steps[0][2], 0.5, {"advantage_estimator": "ppo"}),
    Case("critic_load", "MODEL/other", lambda s: s.critic.options["model"], "other", {"advantage_estimator": "ppo"}),
    Case("value_clip", 0.5, lambda s: s.critic.steps[0][1].value_clip, 0.5, {"advantage_estimator": "ppo"}),
    Case("num_critic_only_steps", 1, lambda s: (len(s.critic.steps), len(s.trainer.steps)), (2, 1), {"advantage_estimator": "ppo"}),
    Case("lr", 0.125, rates, [0.125, 0.125]),
    Case("lr", 0.125, rates, [0.125], job="sft"),
    Case("lr_warmup_rollouts", 2, rates, [0.5, 1.0], {"lr": 1.0}),
    Case("lr_warmup_rollouts", 2, rates, [0.5, 1.0], {"lr": 1.0, "sft_epochs": 2}, job="sft"),
    Case("lr_decay_style", "linear", rates, [1.0, 0.55], {"lr": 1.0}),
    Case("lr_decay_style", "cosine", rates, [1.0, 0.775, 0.325], {"lr": 1.0, "num_rollout": 3}),
    Case("lr_decay_style", "linear", rates, [1.0, 0.55], {"lr": 1.0, "sft_epochs": 2}, job="sft"),
    Case("lr_decay_style", "cosine", rates, [1.0, 0.775, 0.325], {"lr": 1.0, "sft_epochs": 3}, job="sft"),
    Case("normalize_advantages", True, lambda s: round(sum(advantages(s).values()), 3), -0.502),
    Case("micro_batch_size", 3, trainer("micro_batch_rows"), 3),
    Case("kl_loss_type", "low_var_kl", loss("kl_loss_type"), "low_var_kl", {"use_kl_loss": True}),
    Case("max_tokens_per_gpu", 512, trainer("micro_batch_tokens"), 512),
    Case("tree_packing", False, trainer("tree_packing"), False),
    Case("actor_num_gpus_per_node", 2, trainer("world_size"), 2),
    Case("async_save", True, lambda s: [e for e in s.trainer.events if "save" in e], ["save begun", "save complete"]),
    Case("trainer_timeout_s", 60.0, trainer("timeout_s"), 60.0),
    Case("distributed_timeout_minutes", 0.5, trainer("collective_timeout_s"), 30.0),
    Case("profile", 2, lambda s: s.trainer.profiled, [None, "profile"]),
    Case("megatron", {"weight_decay": 0.5}, trainer("megatron"), {"weight_decay": 0.5}),
    *[
        Case("megatron", {name: value}, trainer("megatron"), {name: value})
        for name, value in {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "moe_aux_loss_coeff": 0.25}.items()
    ],
    # adapters
    Case("lora_rank", 4, lora("lora_rank"), 4),
    Case("lora_rank", 4, lora("lora_rank"), 4, job="sft"),
    Case("lora_rank", 4, lambda s: "adapter" in s.files, True),
    Case("lora_rank", 4, lambda s: "adapter" in s.files, True, job="sft"),
    Case("lora_alpha", 32.0, lora("lora_alpha"), 32.0, RANK4),
    Case("lora_dropout", 0.5, lora("lora_dropout"), 0.5, RANK4),
    Case("lora_target_modules", ["q_proj"], lora("lora_target_modules"), ("q_proj",), RANK4),
    Case("lora_adapter_path", "MODEL/other", lambda s: s.trainer.options["lora"].used, True),
    Case("lora_adapter_path", "MODEL/other", lambda s: s.trainer.exported[0], ("v0", 0)),
    Case("lora_adapters", TEAMS, lambda s: s.trainer.trained, [("red", 4), ("blue", 4)] * 2, RANK4 | ROLES, numbers),
    Case("lora_adapters", TEAMS, sampling("adapter"), {"red"}, RANK4 | ROLES, numbers),
    Case("lora_adapters", TEAMS, lambda s: [e.version for e in s.engines], [2, 2], RANK4 | ROLES, numbers),
    Case("lora_adapters", TEAMS, lambda s: {"adapter/red", "adapter/blue"} <= {*s.files}, True, RANK4 | ROLES, numbers),
    # evaluation
    Case("eval_interval", 1, evaluated, ["eval/test/0", "eval/test/1", "eval/test/2"]),
    Case("eval_prompt_data", ["held", "MODEL/tasks.jsonl"], evaluated, ["eval/held/0", "eval/held/2"], EVALUATED),
    Case("eval_prompt_data", ["held:n_samples_per_eval_prompt=3", "MODEL/tasks.jsonl"], eval_questions, 6, EVALUATED | {"eval_limit": 2}),
    Case("n_samples_per_eval_prompt", 3, eval_questions, 12, EVALUATED),
    Case("eval_temperature", 0.5, sampling("temperature", held_out=True), {0.5}, EVALUATED),
    Case("eval_top_p", 0.5, sampling("top_p", held_out=True), {0.5}, EVALUATED),
    Case("eval_top_k", 3, sampling("top_k", held_out=True), {3}, EVALUATED),
    Case("eval_max_response_len", 77, sampling_first, {77}, EVALUATED),
    Case("eval_players", {"first": f"{PAIR}:echo"}, eval_roles, {("second",)}, ROLES | EVALUATED, numbers),
    Case("eval_engine", ["separate"], engines_of_evaluations, [False, True], EVALUATED),
    Case("eval_limit", 2, eval_questions, 2, EVALUATED),
    Case("eval_limit", 2, eval_questions, 2, EVALUATED | {"eval_prompt_data": ["held", "MODEL/tasks.jsonl"]}),
    Case("data_source_path", "ENV:Noting", told_results, [[0, 1], [2, 3]]),
    Case("data_source_path", "ENV:Reversed", lambda s: index_of(s.asked()[0]) // 2, 1, {"concurrency": 1}),
    # schedule
    Case("schedule", "async", schedule_of("slot"), [0, 1, 2, 3]),
    Case("schedule", "one_step_off", schedule_of("staleness"), [0, 0, 1, 1]),
    Case("async_buffer_size", 6, schedule_of("staleness"), [0, 0, 1, 1, 2, 2, 2, 2], ASYNC),
    Case("consumption_window", 3, lambda s: schedule_of("slot")(s)[0], 1, ASYNC, first_group_is_slow),
    Case("update_weights_interval", 2, lambda s: s.engine.version, 2, ASYNC),
    Case("max_staleness", 0, error, "ConfigError", ASYNC),
    Case("partial_rollout", False, engine("keep_interrupted"), False, ASYNC),
    Case("dynamic_sampling_filter_path", "ENV:odd_groups", trained_groups, {1, 3}, {"num_rollout": 1}),
    Case("max_resamples", 1, trained_groups, {1}, {"num_rollout": 1, "dynamic_sampling_filter_path": "ENV:odd_groups"}),
    Case("over_sampling_batch_size", 3, trained_groups, {1, 2}, {"num_rollout": 1}, first_group_is_slow),
    Case("buffer_filter_path", "ENV:nothing", is_played_again, False, OVER_SAMPLED, first_group_is_slow),
    # sft
    Case("sft_epochs", 2, lambda s: len(s.trainer.steps), 2, job="sft"),
    Case("sft_batch_size", 2, lambda s: [len(rows) for rows, _, _ in s.trainer.steps], [2, 2, 2], job="sft"),
    Case("seed", 7, trainer("seed"), 7, job="sft"),
]  # fmt: skip
ELSEWHERE = {
    "env": "every case names one, and its tasks are what is played",
    "otlp_endpoint": "needs a receiver: test_telemetry.py",
    "trackers": "needs a service: test_trackers.py",
    "tracking_project": "needs a service: test_trackers.py",
    "custom_rm_path": "needs a function: test_slime_hooks.py",
    "group_rm": "needs a function: test_slime_hooks.py",
    "custom_generate_function_path": "needs a function: test_slime_hooks.py",
    "rollout_function_path": "needs a function: test_slime_hooks.py",
    "use_fault_tolerance": "needs a crash: test_fault_tolerance.py",
    "log_level": "changes what is logged, nothing in the run",
    "apply_chat_template": "needs a function: test_slime_hooks.py, test_what_only_the_check_reads",
    "global_batch_size": "follows from the other three of its equation: test_what_only_the_check_reads",
    "non_finite_step": "needs a step that is not finite: test_non_finite.py",
    "runner_processes": "needs servers: test_runners.py",
    "engine": "needs servers: test_sglang_plan.py",
    "colocate": "needs servers: test_sglang_plan.py",
    "weight_sync": "needs servers: test_sglang_plan.py",
    "update_weight_buffer_size": "needs servers: test_settings_of_servers",
    "update_weight_disk_dir": "needs servers: test_sglang_plan.py",
    "rollout_num_gpus": "needs servers: test_sglang_plan.py",
    "rollout_min_num_gpus": "needs a cluster: test_ray_servers.py",
    "rollout_num_gpus_per_engine": "needs servers: test_sglang_plan.py",
    "rollout_external_engine_addrs": "needs servers: test_settings_of_servers",
    "actor_num_nodes": "needs machines: test_nodes.py",
    "node_rank": "needs machines: test_nodes.py",
    "master_addr": "needs machines: test_nodes.py",
    "master_port": "needs machines: test_nodes.py",
    "ray_address": "needs a cluster: test_ray_servers.py",
    "engine_python": "needs servers: test_sglang_plan.py",
    "engine_pythonpath": "needs servers: test_sglang_plan.py",
    "gateway_idle_s": "of `agentrl gateway`: tests/gateway/test_open_gateway.py",
    "sglang": "needs servers: test_sglang_plan.py",
}
"""why no case here has the setting"""


def _id(case):
    components = [case.name, str(case.value)[:20], *([] if case.job == "train" else [case.job])]
    return "-".join(components)


@pytest.mark.parametrize("case", CASES, ids=_id)
async def test_a_setting_reaches_what_it_is_for(play, plain_runs, case):
    with_it = await play(case.given | {case.name: case.value}, case.script, case.job)
    key = repr(case.given), case.script, case.job
    without = plain_runs[key] = plain_runs.get(key) or await play(case.given, case.script, case.job)
    if case.see is not error:
        assert (with_it.error, without.error) == (None, None)
    got, before = case.see(with_it), case.see(without)
    assert got == (pytest.approx(case.want) if case.see is rates else case.want)
    assert before != got, "the case shows nothing: the run is the same without the setting"


def test_every_setting_has_a_case():
    everything = {*FIELDS, *TABLES}
    covered = {case.name for case in CASES}
    assert covered | ELSEWHERE.keys() == everything
    assert not covered & ELSEWHERE.keys()
    assert all(ELSEWHERE.values())


def test_no_case_has_the_default():
    defaults = {f.name: f.default for cls in SECTIONS.values() for f in fields(cls)}
    usual = [c.name for c in CASES if defaults.get(c.name) == c.value]
    assert usual == ["tensorboard"], "off in all other cases"


# -- more of what the cases above show one by one ------------------------------------------------------------------------


async def test_old_log_probs_are_the_trainers_own_before_the_first_step_and_reference_ones_the_references(play):
    seen = await play({"num_steps_per_rollout": 2, "use_kl_loss": True, "kl_loss_coef": 0.1})
    assert seen.trainer.events == ["old", "old", "reference", "reference", "step", "step"] * 2
    for number, (rows, _, _) in enumerate(seen.trainer.steps):
        for row in rows:
            trained = row.weights > 0
            assert set(row.old_log_probs[trained]) == {OLD - 2 * (number // 2)}, "of the weights that sampled"
            assert set(row.ref_log_probs[trained]) == {REFERENCE}
            assert set(row.old_log_probs[trained]) != set(row.rollout_log_probs[trained])


async def test_a_critic_is_trained_whole_beside_adapters(play):
    seen = await play({"lora_rank": 4, "advantage_estimator": "ppo"})
    assert seen.trainer.options["lora"].used
    assert "lora" not in seen.critic.options


async def test_one_step_per_rollout_asks_for_no_old_log_probs(play):
    seen = await play({})
    assert seen.trainer.events == ["step", "step"]
    assert all(r.old_log_probs is None and r.ref_log_probs is None for r in seen.rows)


async def test_rows_hold_what_the_engine_said_and_the_seed_decides_what_it_is_asked(play):
    seen, again, other = await play({}), await play({}), await play({"seed": 7})
    by_session = {t.episode_id: t for t in seen.played}
    for row in seen.rows:
        t = by_session[row.source[0]]
        assert row.tokens.tolist() == list(t.segments[0].ids)
        said = [p for s in t.segments[0].spans for p in (s.log_probs or [0.0] * len(s.ids))]
        assert np.allclose(row.rollout_log_probs, said)
    seeds = [sorted(r.sampling.seed for r in s.asked()) for s in (seen, again, other)]
    assert seeds[0] == seeds[1]
    assert not set(seeds[0]) & set(seeds[2])
    assert tasks(seen) != tasks(other), "in another order"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"apply_chat_template": False}, "--apply-chat-template false gives a prompt unchanged to a function"),
        ({"global_batch_size": 7}, "rollout_batch_size × n_samples_per_prompt must equal"),
    ],
)
def test_what_only_the_check_reads(settings, why):
    with pytest.raises(ConfigError, match=why):
        build_config(settings)


def test_global_batch_size_follows_from_its_equation():
    sizes = {"rollout_batch_size": 6, "n_samples_per_prompt": 4}
    assert build_config(sizes | {"num_steps_per_rollout": 3}).global_batch_size == 8
    assert build_config(sizes | {"num_steps_per_rollout": 3, "global_batch_size": 8}).global_batch_size == 8


@pytest.mark.parametrize("kind", ["split", "colocated"])
def test_settings_of_servers(model, kind):
    settings = {"engine": "sglang", "rollout_external_engine_addrs": ["127.0.0.1:1"], "weight_sync": kind}
    given = {"hf_checkpoint": str(model / "model"), "env": str(ENV), "update_weight_buffer_size": 12345}
    components = assemble.Components(build_config(given, settings))
    assert [m.engine.address for m in components.engine().members] == ["http://127.0.0.1:1"]
    sync = components.weight_sync(components.engine())
    try:
        assert sync.bucket_bytes == 12345
        assert type(sync) is {"split": BroadcastSync, "colocated": ColocatedSync}[kind]
    finally:
        sync.close()
        components.close()


async def test_flags_of_the_gateway_are_refused_where_no_agent_uses_it(play):
    assert "is not an AgentEnv" in str((await play({"gateway_port": 1})).error)


async def test_an_agents_environment_cannot_be_isolated(play):
    seen = await play({"env": str(ENV.with_name("joint_agent.py")), "env_isolation": "process"})
    assert "cannot be isolated" in str(seen.error)


async def test_an_agents_environment_has_no_context_policy(play):
    seen = await play({"env": str(ENV.with_name("joint_agent.py")), "context_policy": "summarise"})
    assert "leave out the context policy" in str(seen.error)


@pytest.mark.parametrize("job", ["train", "sft"])
async def test_a_step_that_is_not_finite_stops_the_run_or_is_left_out(play, monkeypatch, job):
    step = NotingTrainer.step

    def first_fails(self, rows, loss, lr):
        result = step(self, rows, loss, lr)
        if len(self.steps) == 1:
            raise NonFiniteError("token 5")
        return result

    monkeypatch.setattr(NotingTrainer, "step", first_fails)
    stopped = await play({"sft_batch_size": 3}, job=job)
    assert "optimizer step 1: token 5" in str(stopped.error)
    skipped = await play({"sft_batch_size": 3, "non_finite_step": "skip"}, job=job)
    assert (skipped.error, len(skipped.trainer.steps)) == (None, 2)
