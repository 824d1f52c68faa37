"""Bad input: one sentence, exit status 2, nothing overwritten and nothing started."""

import json

import pytest
from doubles import FakeEngine
from tiny_model import QWEN3, TEMPLATE

from agentrl.cli.flags import read_given
from agentrl.cli.main import main, make_parser
from agentrl.errors import ConfigError
from agentrl.run.components import Components
from agentrl.run.resolve import resolve

EXAMPLE = ("--env", "search_r1")


@pytest.fixture
def talk(here):
    """Supervised data: talk.jsonl in the current folder."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    (here / "talk.jsonl").write_text(json.dumps({"messages": messages}))


def refused(capsys, *words):
    """Run a command that is refused; return its sentence."""
    assert main([*words]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1, captured.err
    return captured.err


GOOD_ROW = '{"question": "q", "golden_answers": ["a"]}\n'


@pytest.mark.parametrize(
    ("rows", "messages"),
    [
        (None, ["no data file d.jsonl"]),
        (GOOD_ROW + '{"question": \n', ["d.jsonl, line 2: not JSON"]),
        (GOOD_ROW + '{"question": "q", "golden_answers": 5}\n', ["d.jsonl, line 2", "label must be", "5"]),
        ('{"questions": "q", "golden_answers": ["a"]}\n', ["no column 'question'", "did you mean 'questions'"]),
    ],
    ids=["no file", "not JSON", "a label of the wrong type", "no column"],
)
def test_a_data_file_that_cannot_be_used(here, model, capsys, rows, messages):
    if rows is not None:
        (here / "d.jsonl").write_text(rows)
    err = refused(capsys, "train", *EXAMPLE, "--model", str(model), "--prompt-data", "d.jsonl")
    assert all(message in err for message in messages), err
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("train --rollout-batchsize 3", ["unknown flag --rollout-batchsize; did you mean 'rollout-batch-size'"]),
        ("check --env search_r1 --episode=3", ["unknown flag --episode=3; did you mean 'episodes'?"]),
        ("check --env search_r1 --episodes 0", ["--episodes must be at least 1, found 0"]),
        ("replay --keep-whole-outputs nowhere", ["no episodes at nowhere"]),
        ("check --env search_r1 --colocate", ["unknown flag --colocate"]),
        ("train --num-rollout", ["agentrl train: --num-rollout takes one value, found none"]),
        ("train --num-rollout many", ["--num-rollout", "'many'"]),
        ("trian --env search_r1", ["agentrl: unknown command 'trian'; did you mean 'train'?"]),
        ("train --env search_r2", ["unknown env 'search_r2'; did you mean 'search_r1'"]),
        ("train --env search_r1 --model nowhere", ["no such folder"]),
        ("train --rollout-top-p 0.9", ["--allow-truncated-sampling"]),
        (
            "train --rollout-batch-size 3 --n-samples-per-prompt 8 --global-batch-size 16",
            ["3 × 8 = 24", "16 × 1 = 16"],
        ),
        # it takes a Python function, which a flag cannot give; tests and `agentrl check` use it
        ("rollout --engine scripted", ["--engine must be one of local, sglang, found 'scripted'"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_words_that_cannot_be_used(here, capsys, words, messages):
    err = refused(capsys, *words.split())
    assert all(message in err for message in messages), err
    assert not (here / "runs").exists()


def test_check_gives_advice_about_two_tools_of_one_name(here, capsys):
    (here / "twice.py").write_text(
        "from agentrl import Tool, ToolEnv, tool\n"
        "class Look(Tool):\n"
        "    name = 'look'\n"
        "    def call(self, place: str) -> str: return place\n"
        "class Twice(ToolEnv):\n"
        "    tools = (Look,)\n"
        "    @tool\n"
        "    def look(self, place: str) -> str: return place\n"
    )
    assert main(["check", "--env", "twice.py"]) == 1
    out = capsys.readouterr().out
    assert "has two tools of the same name: ['look']" in out
    assert "give each tool a unique name" in out


LONG, DEEP, HUGE = "x" * 5000, "[" * 3000, "9" * 6000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--env", LONG], "unknown env"),
        (["train", *EXAMPLE, "--run", LONG], "ame too long"),
        (["rollout", *EXAMPLE, "--prompt-data", LONG], "ame too long"),
        (["check", "--env", LONG], "unknown env"),
        (["check", *EXAMPLE, "--prompt-data", LONG], "ame too long"),
        (["eval", *EXAMPLE, "--model", LONG], "ame too long"),
        (["view", LONG], "ame too long"),
        (["help", LONG], "unknown flag"),
        (["train", *EXAMPLE, f"--{LONG}", "1"], "unknown flag"),
        ([LONG], "unknown command"),
        (["check", "--env", f"./{LONG}.py"], "…xxx"),
        (["check", *EXAMPLE, "--env-arg", f"{LONG}=1"], "takes no argument"),
        (["train", *EXAMPLE, "--lr", LONG], "--lr must be a number"),
        (["check", *EXAMPLE, "--env-arg", f"corpus={DEEP}"], "is nested too deep"),
        (["check", *EXAMPLE, "--env-arg", f"corpus={HUGE}"], "is an integer of too many digits"),
        (["rollout", *EXAMPLE, "--num-rollout", HUGE], "--num-rollout must be an integer"),
        (["rollout", *EXAMPLE, "--run", "a\0b"], "--run must be Unicode text without NUL"),
        (["rollout", *EXAMPLE, "--prompt-data", "a\0b"], "--prompt-data must be Unicode text without NUL"),
        (["rollout", *EXAMPLE, "--env-arg", "corpus=a\0b"], "without NUL"),
    ],
    ids=lambda value: f"{value[0]} {value[-1]:.16}" if isinstance(value, list) else "",
)
def test_long_names_nul_bytes_huge_integers_and_deep_nesting_are_one_sentence(here, capsys, words, message):
    err = refused(capsys, *words)
    assert message in err
    assert err.count("\n") == 1
    assert len(err) < 1000, "long names are cut"
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"[data]\nprompt_data = {DEEP}\n", "nested too deep"),
        (f"[rollout]\nnum_rollout = {HUGE}\n", "limit (4300 digits)"),
        ('[run]\nrun = "a\\u0000b"\n', "--run must be Unicode text without NUL"),
        (f'[env]\nenv = "{LONG}"\n', "unknown env"),
    ],
    ids=["deep", "huge", "nul", "long"],
)
def test_the_same_in_a_settings_file_is_one_sentence(here, capsys, text, message):
    (here / "settings.toml").write_text(text)
    err = refused(capsys, "rollout", "--config", "settings.toml", *(() if "[env]" in text else EXAMPLE))
    assert message in err
    assert err.count("\n") == 1
    assert len(err) < 1000, "long names are cut"


def test_check_plays_the_tasks_of_a_data_file(here, capsys):
    (here / "plain.py").write_text(
        "from agentrl import ToolEnv, reward\n"
        "@reward\n"
        "def right(trajectory): return float(trajectory.answer == trajectory.label)\n"
        "class Plain(ToolEnv):\n"
        "    rewards = [right]\n"
    )
    (here / "data.jsonl").write_text('{"q": "one?", "a": "1"}\n{"q": "two?", "a": "2"}\n')
    words = ["check", "--env", "plain.py", "--prompt-data", "data.jsonl"]
    assert main([*words, "--input-key", "q", "--label-key", "a"]) == 0
    out = capsys.readouterr().out
    assert "scores 0 to 1" in out, "one policy writes the label of the file"
    assert "generated" not in out
    err = refused(capsys, *words)
    assert "data.jsonl, line 1: no column 'prompt'" in err
    assert "give it, or leave --label-key out" in refused(capsys, "check", "--env", "plain.py", "--label-key", "a")


def test_unknown_env_argument_suggests(here, model, capsys):
    err = refused(capsys, "train", *EXAMPLE, "--model", str(model), "--env-arg", "retrever=bm25")
    assert "takes no argument 'retrever'; did you mean 'retriever'" in err


@pytest.mark.parametrize(
    ("given", "message"),
    [("corpus=missing.jsonl", "missing.jsonl: cannot be read"), ("retriever=bm52", "retriever must be 'bm25'")],
)
@pytest.mark.parametrize("command", ["train", "rollout", "eval"])
def test_an_argument_that_the_environment_refuses(here, model, capsys, command, given, message):
    assert message in refused(capsys, command, *EXAMPLE, "--model", str(model), "--env-arg", given)
    assert not (here / "runs").exists()


def test_groups_of_one_train_nothing(here, model, capsys):
    words = ["train", *EXAMPLE, "--model", str(model), "--n-samples-per-prompt", "1"]
    assert "--n-samples-per-prompt 1 trains nothing" in refused(capsys, *words)
    assert "no data file" in refused(capsys, *words, "--entropy-coef", "0.01", "--prompt-data", "nowhere.jsonl")
    assert not (here / "runs").exists()


def test_model_without_chat_template(here, model, capsys):
    (model / "tokenizer_config.json").write_text("{}")
    assert "no chat template" in refused(capsys, "train", *EXAMPLE, "--model", str(model))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not JSON"),
        ("[]", "config.json: expected a JSON object, found []"),
        ('{"max_position_embeddings": "x"}', "max_position_embeddings must be an integer, found 'x'"),
    ],
)
def test_a_model_config_that_cannot_be_used(here, model, capsys, text, message):
    (model / "config.json").write_text(text)
    assert message in refused(capsys, "eval", *EXAMPLE, "--model", str(model))


def test_an_environment_whose_tasks_are_not_tasks(here, model, capsys):
    (here / "env.py").write_text(
        "from agentrl import Env\nclass E(Env):\n    @classmethod\n    def tasks(cls, split): return [{'prompt': 'x'}]\n"
    )
    err = refused(capsys, "rollout", "--env", "env.py", "--model", str(model))
    assert "E.tasks('test') must yield agentrl.Task, found dict: {'prompt': 'x'}" in err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "E.tasks('test') must return an iterable of agentrl.Task, found None"),
        ("return [][1]", "env.py, line 4: IndexError: list index out of range"),
        ("yield 1 / 0", "env.py, line 4: ZeroDivisionError: division by zero"),
    ],
)
def test_an_environment_whose_tasks_fail(here, model, capsys, body, message):
    text = "from agentrl import Env\nclass E(Env):\n    @classmethod\n    def tasks(cls, split): "
    (here / "env.py").write_text(text + body)
    err = refused(capsys, "eval", "--env", "env.py", "--model", str(model))
    assert "E.tasks('test')" in err
    assert message in err


def test_text_for_a_number_in_the_settings_of_the_environment(here, model, capsys):
    (here / "env.py").write_text("from agentrl import Env\nclass E(Env): ...\n")
    (here / "env.toml").write_text('[train]\nactor_num_gpus_per_node = "two"\n')
    err = refused(capsys, "train", "--env", "env.py", "--model", str(model))
    assert "--actor-num-gpus-per-node must be an integer" in err
    assert "found 'two'" in err


def test_an_environment_with_endless_tasks(here, model, capsys, monkeypatch):
    (here / "env.py").write_text(
        "from itertools import count\nfrom agentrl import Env, Task\nclass E(Env):\n    @classmethod\n"
        "    def tasks(cls, split): return (Task(str(i), 'x') for i in count())\n"
    )
    monkeypatch.setattr("agentrl.data.task_sets.MAX_TASKS", 1000)
    words = ["--env", "env.py", "--model", str(model)]
    err = refused(capsys, "train", *words)
    assert "E.tasks('train') yields more than 1000 tasks and may be infinite; set --data-limit N for training" in err
    components = Components(
        resolve(read_given(*make_parser()[0].parse_known_args(["train", *words, "--data-limit", "2000"])))
    )
    assert (len(components.tasks.training()), len(components.tasks.evaluation()["test"])) == (2000, 200)


@pytest.mark.parametrize("words", [["train"], ["rollout"], ["eval"], ["sft", "talk.jsonl"]], ids=lambda w: w[0])
@pytest.mark.usefixtures("talk")
def test_run_folder_exists(here, model, capsys, words):
    run = here / "run"
    run.mkdir()
    (run / "precious").write_text("kept")
    err = refused(capsys, *words, *EXAMPLE, "--model", str(model), "--run", str(run))
    assert "already exists" in err
    assert "--resume" not in err, "it is not a training run"
    assert [p.name for p in run.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("state", "config", "resumable"),
    [
        ('{"step": 3, "recorded": false}', True, True),
        ('{"step": 3, "recorded": true}', True, False),
        ("{", True, False),
        ('{"step": 3}', False, False),
    ],
    ids=["training", "train-only", "damaged", "no settings"],
)
def test_the_error_for_a_taken_run_folder_suggests_resume_if_that_is_possible(
    here, model, capsys, state, config, resumable
):
    path = here / "run/checkpoints/000003/state.json"
    path.parent.mkdir(parents=True)
    path.write_text(state)
    if config:
        (here / "run/config.toml").touch()
    err = refused(capsys, "train", *EXAMPLE, "--model", str(model), "--run", "run")
    assert ("agentrl train --resume run" in err) is resumable


# -- limits of the trainer are reported before there is a run folder ----------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tensor-model-parallel-size 3", "3 does not divide the model's 2 key-value heads"),
        ("--pipeline-model-parallel-size 2 --num-layers 3", "num_layers = 3 contradicts the model"),
        ("--tensor-model-parallel-size 2 --actor-num-gpus-per-node 3", "3 ranks are not a multiple"),
        ("--tensor-model-parallel-size 0", "must be at least 1, found 0"),
        ("--eps-clip-c 1", "--eps-clip-c must be above 1"),
    ],
)
@pytest.mark.parametrize("command", ["train", "sft talk.jsonl"])
@pytest.mark.usefixtures("talk")
def test_settings_that_do_not_fit_the_model(here, model, capsys, command, words, message):
    words = words if "--actor" in words else f"{words} --actor-num-gpus-per-node none"
    assert message in refused(capsys, *command.split(), *EXAMPLE, "--model", str(model), *words.split())
    assert not (here / "runs").exists()


@pytest.mark.usefixtures("talk")
def test_megatrons_flags_before_the_episodes_keep_their_values(here, model, capsys):
    words = ["sft", *EXAMPLE, "--model", str(model), "--tensor-model-parallel-size", "3"]
    for flag in ("--sequence-parallel", "--weight-decay=0.1"):
        err = refused(capsys, *words, "--actor-num-gpus-per-node", "none", flag, "talk.jsonl")
        assert "3 does not divide the model's 2 key-value heads" in err
    assert "the following arguments are required: EPISODES" in refused(capsys, *words)
    assert "unknown flag --tensor-model; did you mean" in refused(capsys, "sft", "--tensor-model", "3", "talk.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("wieght_decay = 0.1", "megatron-core has no setting 'wieght_decay'; did you mean 'weight_decay'"),
        ('weight_decay = "much"', "weight_decay takes a value of type float; found 'much'"),
        ("tensor_model_parallel_size = true", "takes a value of type int; found True"),
        ("bf16 = true", "bf16 cannot be set: it follows from --dtype"),
    ],
)
def test_mistakes_in_megatrons_table(here, model, capsys, line, message):
    (here / "c.toml").write_text(f"[megatron]\n{line}\n")
    assert message in refused(capsys, "train", "--config", "c.toml", *EXAMPLE, "--model", str(model))
    assert not (here / "runs").exists()


@pytest.mark.parametrize("command", ["train", "rollout", "eval"])
def test_a_model_without_weights(here, model, capsys, command):
    (model / "model.safetensors").unlink()
    assert "holds no *.safetensors files" in refused(capsys, command, *EXAMPLE, "--model", str(model))
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert "has no file one.safetensors" in refused(capsys, command, *EXAMPLE, "--model", str(model))
    assert not (here / "runs").exists()


def test_a_model_config_without_a_key_of_the_shape(here, model, capsys):
    (model / "config.json").write_text(json.dumps({k: v for k, v in QWEN3.items() if k != "rms_norm_eps"}))
    assert "has no key rms_norm_eps" in refused(capsys, "train", *EXAMPLE, "--model", str(model))


def test_more_trainer_ranks_than_gpus(here, model, capsys, monkeypatch):
    monkeypatch.setattr("agentrl.run.machines.gpus", lambda: [(80_000, 80_000)])
    words = [*EXAMPLE, "--model", str(model), "--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node"]
    for ranks in ("2", "none"):
        assert "needs 2 GPUs, one for each rank; this machine has 1" in refused(capsys, "train", *words, ranks)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(("command", "trains"), [("train", True), ("rollout", False), ("eval", False)])
def test_servers_are_planned_with_a_trainer_only_for_training(here, model, capsys, monkeypatch, command, trains):
    def plan(*_, trains, **_others):
        raise ConfigError(f"with a trainer: {trains}")

    monkeypatch.setattr("agentrl.engine.sglang.plan.plan_servers", plan)
    words = [*EXAMPLE, "--model", str(model), "--engine", "sglang"]
    assert f"with a trainer: {trains}" in refused(capsys, command, *words)


def test_the_error_for_a_misplaced_key_names_its_section(here, capsys):
    (here / "c.toml").write_text("[train]\nrollout_batch_size = 3\n")
    assert "it belongs in [rollout]" in refused(capsys, "train", "--config", "c.toml")


def test_resume_needs_a_run_and_its_own_settings(here, model, capsys):
    assert "is not a run folder" in refused(capsys, "train", "--resume", "nowhere")
    (here / "run").mkdir()
    (here / "run" / "config.toml").write_text("")
    assert "is a run that cannot be resumed" in refused(capsys, "train", "--resume", "run")
    (here / "run" / "checkpoints").mkdir()
    assert "leave out --lr" in refused(capsys, "train", "--resume", "run", "--lr", "1")
    (here / "c.toml").write_text("")
    assert "leave out --config" in refused(capsys, "train", "--resume", "run", "--config", "c.toml")
    assert "leave out --train-only" in refused(capsys, "train", "--resume", "run", "--train-only", "run")


@pytest.mark.parametrize("command", ["train", "train --train-only x", "rollout", "eval", "sft x"])
def test_an_interrupt_before_there_is_a_run_folder_does_not_suggest_resume(here, capsys, monkeypatch, command):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("agentrl.cli.flags.read_flags", interrupt)
    assert main(command.split()) == 130
    output = capsys.readouterr()
    assert output.err.endswith(": interrupted\n")
    assert "--resume" not in output.out


def test_env_whose_step_returns_the_wrong_type(here, model, capsys, monkeypatch):
    (here / "bad.py").write_text(
        "from agentrl import Env, Task\n"
        "class Bad(Env):\n"
        "    @classmethod\n"
        "    def tasks(cls, split): return [Task('0', 'hello', 1)]\n"
        "    def step(self, action): return 'done'\n"
    )
    assert main(["check", "--env", "bad.py"]) == 1
    out = capsys.readouterr().out
    assert "step" in out
    assert "StepResult" in out
    monkeypatch.setattr("agentrl.run.components.Components.engine", lambda self, *_: FakeEngine(self.renderer, ["x"]))
    err = refused(capsys, "rollout", "--env", "bad.py", "--model", str(model), "--rollout-batch-size", "1")
    assert "step" in err
    assert "StepResult" in err
    assert "'done'" in err


ENV = """
from agentrl import Env, Task, Tool, ToolEnv, tool

class Clock(Tool):
    def call(self, zone: str) -> str:
        return "noon"

class Ask(ToolEnv):
    tools = [Clock]

    @classmethod
    def tasks(cls, split):
        return [Task("0", PROMPT, 1)]

    @tool
    def look_up(self, query: str) -> str:
        return "x"
"""
NO_SYSTEM = (
    "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system role') }}{% endfor %}" + TEMPLATE
)
NO_SYSTEM_SHOWN = TEMPLATE.replace("in messages %}", "in messages if m.role != 'system' %}")
SHOWN = "{{ tools | tojson if tools }}" + TEMPLATE


class TestTheChatTemplateIsCheckedFirst:
    """Before an engine starts, the chat template is checked for what the environment needs."""

    @pytest.fixture
    def run(self, here, model, capsys):
        def run(template, more="", prompt="'hello'", env="env.py:Ask"):
            (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
            (here / "env.py").write_text(ENV.replace("PROMPT", prompt) + more)
            code = main(["eval", "--model", str(model), "--env", env, "--engine", "local"])
            err = capsys.readouterr().err
            assert (here / "runs").exists() is (code == 1)  # then the weights are checked, which are incomplete
            return err

        return run

    def test_a_template_that_omits_tools(self, run):
        err = run(TEMPLATE)
        assert "its chat template omits tools, so the policy would not see clock, look_up of environment Ask" in err
        assert "omits tools" in run(TEMPLATE, "    system_prompt = 'Call clock(zone).'\n")

    @pytest.mark.parametrize(("template", "more"), [
        (SHOWN, ""), (TEMPLATE, "    shows_tools = True\n"), (TEMPLATE, "    action_format = 'search_r1'\n"),
        (TEMPLATE, "    system_prompt = 'Call clock(zone) or look_up(query).'\n"), (TEMPLATE, "    tools = []\n    look_up = None\n"),
    ])  # fmt: skip
    def test_a_template_that_shows_tools_or_need_not(self, run, template, more):
        err = run(template, more)
        assert "omits tools" not in err
        assert "tensors are missing" in err

    @pytest.mark.parametrize("more", ["", "    action_format = 'search_r1'\n"])
    @pytest.mark.parametrize(("template", "message"), [
        (NO_SYSTEM, "refuses a conversation of roles (system, user): no system role"), (NO_SYSTEM_SHOWN, "leaves messages of role 'system' out"),
    ])  # fmt: skip
    def test_a_template_that_refuses_a_system_prompt(self, run, template, message, more):
        assert message in run(template, f"{more}    shows_tools = True\n    system_prompt = 'Be brief.'\n")

    @pytest.mark.parametrize("more", ["", "    action_format = 'search_r1'\n"])
    def test_a_template_that_omits_a_role_of_a_task(self, run, more):
        template = TEMPLATE.replace("in messages %}", "in messages if m.role in ('user', 'assistant', 'tool') %}")
        prompt = "({'role': 'developer', 'content': 'be brief'}, {'role': 'user', 'content': 'hello'})"
        err = run(template, f"{more}    shows_tools = True\n", prompt)
        assert "task 0: " in err
        assert "leaves messages of role 'developer' out" in err


def test_tokens_reports_what_the_template_does(model, capsys):
    assert main(["tokens", "--model", str(model), "--width", "60"]) == 0
    out = capsys.readouterr().out
    assert "tools          LEFT OUT by the template" in out
    assert "a tool's result: proven over 18 histories, spliced: <|im_end|> \\n<|im_start|>tool\\n[…]" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("SAMPLED")] == [["SAMPLED", "1"]] * 2
    assert main(["tokens", "--model", str(model), "--action-format", "search_r1"]) == 0
    assert "tools          left to the environment's prompt by the action format search_r1" in capsys.readouterr().out
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": SHOWN}))
    assert main(["tokens", "--model", str(model)]) == 0
    assert "tools          the template puts their schemas into the prompt" in capsys.readouterr().out


def test_tokens_of_a_model_that_cannot_be_rendered(model, capsys):
    (model / "tokenizer_config.json").write_text("{}")
    assert "has no chat template" in refused(capsys, "tokens", "--model", str(model))
    assert "unknown flag --histry" in refused(capsys, "tokens", "--model", str(model), "--histry")
