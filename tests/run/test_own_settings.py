"""No command takes the example's model, environment or settings unless it was asked for; recorded runs bring their own."""

import json
import shutil
from pathlib import Path

import pytest
from replays import NoteTrainer

from agentrl.cli.flags import read_given
from agentrl.cli.main import main, make_parser
from agentrl.config import FIELDS, SECTIONS, Config, build_config, read_toml
from agentrl.config.describe import flag_names
from agentrl.config.settings import field_infos
from agentrl.core.program_name import command
from agentrl.errors import ConfigError
from agentrl.run.resolve import resolve, resolve_trained
from agentrl.store import read_episodes
from agentrl.store.run_folder import recorded_config, settings_fingerprint

TOY = """
from agentrl import Env, StepResult, Task, reward

@reward
def odd(trajectory): return float(trajectory.index % 2)

class Toy(Env):
    rewards = [odd]

    def step(self, action): return StepResult(terminated=True)

    @classmethod
    def tasks(cls, split): return [Task(str(n), f"Say {n}.", n) for n in range(2)]
"""
SMALL = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "1", "--tensorboard", "false")
OWN = (
    "--max-turns",
    "3",
    "--rollout-max-context-len",
    "300",
    "--action-format",
    "search_r1",
    "--truncated-episodes",
    "mask",
)
TALK = [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "Paris."}]


@pytest.fixture
def trainer(monkeypatch):
    made = NoteTrainer()
    monkeypatch.setattr("agentrl.run.components.Components.trainer", lambda self, path, *, reference: made)
    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", lambda self: None)
    return made


@pytest.fixture
def recorded(model, says, trainer, tmp_path):
    """A run of `agentrl rollout` with an environment and settings of its own."""
    (tmp_path / "toy.py").write_text(TOY)
    says(lambda asked: f"a {asked.session}")
    assert main(["rollout", "--env", "toy.py", "--model", model, "--run", "R", "--lr", "0.25", *SMALL, *OWN]) == 0
    return tmp_path / "R"


def settings(run, *left_out):
    layer = read_toml(run / "config.toml")
    return {name: value for name, value in layer.items() if name not in ("run", *left_out)}


def given_by(*words):
    return read_given(*make_parser()[0].parse_known_args(list(map(str, words))))


def trained_from(*words):
    """What `agentrl sft` is given, and its sources."""
    args, rest = make_parser()[0].parse_known_args(list(map(str, words)))
    return read_given(args, rest), args.episodes


@pytest.mark.parametrize("command", ["train --train-only R", "sft R"])
def test_training_on_a_run_takes_its_settings_with_flags_over_them(recorded, trainer, tmp_path, command):
    assert main([*command.split(), "--run", "A"]) == 0
    assert settings(tmp_path / "A") == settings(recorded)
    assert trainer.fed
    assert main([*command.split(), "--run", "B", "--lr", "0.5", "--seed", "3"]) == 0
    assert settings(tmp_path / "B", "lr", "seed") == settings(recorded, "lr", "seed")
    assert [settings(tmp_path / "B")[name] for name in ("lr", "seed")] == [0.5, 3]
    (tmp_path / "c.toml").write_text("[train]\nlr = 0.75\nentropy_coef = 0.5\n")
    assert main([*command.split(), "--run", "C", "--config", "c.toml", "--lr", "0.5"]) == 0
    assert settings(tmp_path / "C", "lr", "entropy_coef") == settings(recorded, "lr", "entropy_coef")
    assert [settings(tmp_path / "C")[name] for name in ("lr", "entropy_coef")] == [0.5, 0.5]


@pytest.mark.parametrize("command", ["train --train-only R", "sft R"])
def test_a_run_on_a_run_gets_a_free_folder(recorded, tmp_path, command):
    assert main(command.split()) == 0
    assert (tmp_path / "runs/toy-001/config.toml").exists()


@pytest.mark.parametrize("command", ["train --train-only R", "sft R"])
def test_training_on_a_run_needs_neither_its_data_nor_its_engine(recorded, tmp_path, command):
    text = (recorded / "config.toml").read_text()
    text = text.replace('"local"\ncolocate = false', '"sglang"\ncolocate = true\nrollout_num_gpus = 8')
    text = text.replace("runner_processes = 1", "runner_processes = 4").replace(
        "[data]", '[data]\nprompt_data = "gone.jsonl"'
    )
    text = text.replace("[sglang]", "[sglang]\nmem_fraction_static = 0.5")
    assert build_config(read_toml(recorded / "config.toml")).engine.engine == "local"
    (recorded / "config.toml").write_text(text)
    assert main([*command.split(), "--run", "A"]) == 0
    assert (settings(tmp_path / "A")["engine"], settings(tmp_path / "A")["runner_processes"]) == ("local", 1)


@pytest.mark.parametrize("command", ["train --train-only R", "sft R"])
def test_token_ids_that_the_model_does_not_have_are_refused(recorded, model, trainer, tmp_path, capsys, command):
    highest = max(i for t in read_episodes(recorded / "episodes") for s in t.segments for i in s.ids)
    config = Path(model) / "config.json"
    config.write_text(json.dumps({"max_position_embeddings": 16384, "vocab_size": highest + 1}))
    assert main([*command.split(), "--run", "A"]) == 0
    config.write_text(json.dumps({"max_position_embeddings": 16384, "vocab_size": highest}))
    fed = len(trainer.fed)
    capsys.readouterr()
    assert main([*command.split(), "--run", "B"]) == 2
    error = capsys.readouterr().err
    assert f"token id {highest} is outside the vocabulary of {model} ({highest} tokens)" in error
    assert "give --model with the model that the episodes were recorded with" in error
    assert len(error.splitlines()) == 1
    assert len(trainer.fed) == fed
    assert not (tmp_path / "B").exists()


@pytest.mark.parametrize("command", ["train --train-only R", "sft R", "fork R 0-0 --turn 0"])
def test_token_ids_that_mean_something_else_in_the_model_are_refused(
    recorded, model, trainer, tmp_path, capsys, command
):
    same, other = tmp_path / "same", tmp_path / "other"
    for folder in (same, other):
        shutil.copytree(model, folder)
    text = json.loads((other / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(text))
    assert main([*command.split(), "--run", "A", "--model", str(same)]) == 0
    fed = len(trainer.fed)
    capsys.readouterr()
    forks = len(list(recorded.glob("forks/*")))
    assert main([*command.split(), "--run", "B", "--model", str(other)]) == 2
    assert len(list(recorded.glob("forks/*"))) == forks
    error = capsys.readouterr().err
    assert f"token id {vocabulary['b']} is 'a' for {model}, with which it was recorded, and 'b' for {other}" in error
    assert len(error.splitlines()) == 1
    assert len(trainer.fed) == fed
    assert not (tmp_path / "B").exists()


FLAGS_OF_SFT = {
    "rollout_max_context_len": "300", "threads": "1", "lr": "0.5", "lr_warmup_rollouts": "1", "lr_decay_style": "linear",
    "calculate_per_token_loss": "true", "max_tokens_per_gpu": "512", "tree_packing": "false", "actor_num_gpus_per_node": "1",
    "actor_num_nodes": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n for n, section in FIELDS.items() if section in ("data", "rollout", "engine", "train", "eval")]
)
def test_a_flag_that_sft_does_not_read_is_refused(name):
    values = {
        "reward": "em",
        "eval_prompt_data": "a b",
        "prompt_data": "a.jsonl",
        "weight_sync": "none",
        "global_batch_size": "128",
        "eps_clip_c": "2",
        "branch_at": "1",
        "eval_engine": "separate",
        "players": "white=policy",
        "eval_players": "white=policy",
    }
    default = field_infos(SECTIONS[FIELDS[name]])[name].default
    value = FLAGS_OF_SFT.get(name) or values.get(name) or ("1" if default is None else str(default).lower())
    words = [] if default == () and name not in values else value.split()
    given, sources = trained_from("sft", "chat.jsonl", "--model", "m", flag_names(name)[0], *words or ["h:1"])
    if name in FLAGS_OF_SFT:
        resolve_trained(given, sources)
    else:
        with pytest.raises(ConfigError, match=f"^{flag_names(name)[0]} (has no effect|needs)"):
            resolve_trained(given, sources)


def test_runs_with_different_models_are_not_mixed_silently(recorded, tmp_path):
    other = tmp_path / "S"
    (other / "episodes").mkdir(parents=True)
    (other / "config.toml").write_text(
        '[model]\nhf_checkpoint = "elsewhere"\n[env]\nenv = "toy.py"\n[train]\nlr = 1.0\n'
    )
    given, sources = trained_from("sft", recorded, other, "--env", "toy.py", "--action-format", "hermes")
    with pytest.raises(ConfigError, match=r"different settings of --hf-checkpoint: .* and 'elsewhere'; give the one"):
        resolve_trained(given, sources)
    given, sources = trained_from(
        "sft", recorded, other, "--env", "toy.py", "--action-format", "hermes", "--model", "m"
    )
    assert resolve_trained(given, sources).model.hf_checkpoint == "m"


def test_a_config_that_no_run_wrote_is_not_taken(tmp_path):
    (tmp_path / "demos/part0").mkdir(parents=True)
    (tmp_path / "config.toml").write_text('[model]\nhf_checkpoint = "elsewhere"\n')
    given, sources = trained_from("sft", tmp_path / "demos/part0", "--model", "m")
    assert resolve_trained(given, sources).model.hf_checkpoint == "m"
    assert recorded_config(tmp_path / "demos/part0") is None
    (tmp_path / "episodes").mkdir()
    assert recorded_config(tmp_path / "episodes/000000.jsonl.zst") == tmp_path / "config.toml"


def test_conversations_are_trained_in_the_form_of_the_model_without_an_environment(model, trainer, tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": TALK + TALK}) + "\n")
    assert main(["sft", "chat.jsonl", "--model", model, "--run", "A", "--date", "2026-01-01"]) == 0
    assert build_config(settings(tmp_path / "A")) == build_config({"hf_checkpoint": model, "date": "2026-01-01"})
    (trajectory,) = read_episodes(tmp_path / "A/episodes")
    (segment,) = trajectory.segments
    from agentrl.render import Tokenizer

    tokenizer = Tokenizer.load(model)
    turn = "<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>"
    assert tokenizer.decode(segment.ids).replace("\n<|im_start|>user", "<|im_start|>user") == turn + turn
    trained = [tokenizer.decode(s.ids) for s in segment.spans if s.provenance.name == "DEMONSTRATION"]
    assert trained == ["Paris.<|im_end|>"] * 2


@pytest.mark.parametrize("line", ["train", "rollout", "eval", "train --num-rollout 3", "rollout --env-arg topk=3"])
def test_without_an_environment_or_data_nothing_is_assumed(here_empty, capsys, line):
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert "no environment is given; give --env NAME|FILE.py (search_r1 is the example)" in error
    assert not (here_empty / "runs").exists()


@pytest.fixture
def here_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_finished_run_names_the_next_commands(recorded, tmp_path, capsys):
    capsys.readouterr()
    assert main(["train", "--train-only", "R", "--run", "A"]) == 0
    out = capsys.readouterr().out
    assert out.endswith(
        f"look at it in the browser: {command('view', 'A')}\nuse its weights as a model: --model A/hf\n"
    )
    assert main(["sft", "R", "--run", "B"]) == 0
    assert capsys.readouterr().out.endswith(
        f"weights in B/hf; look at the run in the browser: {command('view', 'B')}\n"
    )


def test_no_default_is_the_examples():
    assert (Config().env.env, Config().model.hf_checkpoint) == (None, None)
    assert "search_r1" not in Config().to_toml()


@pytest.mark.parametrize("command", ["train", "rollout", "eval"])
@pytest.mark.parametrize(
    "words", ["--env search_r1", f"--config {Path(__file__).parents[2]}/examples/search_r1/config.toml"]
)
def test_the_example_keeps_its_settings(command, words, monkeypatch):
    monkeypatch.setattr("agentrl.run.resolve.gpus", list)
    config = resolve(given_by(command, *words.split()))
    assert settings_fingerprint(config) == "370994ef00df4568"
    assert config.model.hf_checkpoint == "search_r1_3m"


# -- data and rewards without an environment ------------------------------------------------------------------------------

REWARD = """
from agentrl import reward

def clean(text): return text.strip().lower()

@reward
def right(trajectory): return float(clean(trajectory.turns[-1].action.text) == clean(trajectory.label))
"""


@pytest.fixture
def questions(model, says, tmp_path):
    says(lambda asked: "Paris" if asked.session[:2] in ("0-", "1-") else "Rome")
    (tmp_path / "scores.py").write_text(REWARD)
    rows = [{"prompt": f"Capital of {c}?", "label": a} for c, a in (("France", "paris"), ("Spain", "Madrid"))]
    for name in ("q", "a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


def test_tasks_and_a_reward_need_no_environment(questions, trainer, tmp_path):
    words = ["--model", questions, "--prompt-data", "q.jsonl", "--reward", "scores.py", *SMALL]
    assert main(["rollout", *words, "--run", "R", "--rollout-shuffle", "false"]) == 0
    episodes = list(read_episodes(tmp_path / "R/episodes"))
    assert [(t.task.id, len(t.turns), t.rewards) for t in episodes if t.index < 2] == [("0", 1, {"right": 1.0})] * 2
    assert {t.rewards["right"] for t in episodes if t.index >= 2} == {0.0}
    assert "env" not in read_toml(tmp_path / "R/config.toml")
    assert read_toml(tmp_path / "R/config.toml")["reward"] == [f"{tmp_path}/scores.py"]
    assert main(["rollout", *words]) == 0
    assert (tmp_path / "runs/q-001").is_dir()
    assert main(["replay", "R"]) == 0
    assert main(["rescore", "R"]) == 0
    assert main(["train", "--train-only", "R", "--run", "A"]) == 0
    assert trainer.fed == [[]] or not trainer.fed, "all groups are flat"


def test_evaluation_sets_need_no_training_data(questions, tmp_path, capsys):
    words = ["--eval-prompt-data", "easy", "a.jsonl", "hard", "b.jsonl", "--reward", "scores.py", "--run", "E"]
    assert main(["eval", "--model", questions, *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "E/metrics.jsonl").read_text().splitlines()]
    assert [row["eval/easy/reward"] for row in rows if "eval/easy/reward" in row] == [0.0]
    assert [row["eval/hard/questions"] for row in rows if "eval/hard/questions" in row] == [2]
    assert len(rows) == 2


def test_an_environment_without_training_tasks_is_evaluated(questions, tmp_path):
    (tmp_path / "held.py").write_text("from agentrl import ToolEnv\nclass Held(ToolEnv): ...\n")
    words = ["--env", "held.py", "--eval-prompt-data", "hard", "b.jsonl", "--reward", "scores.py", "--run", "E"]
    assert main(["eval", "--model", questions, *words]) == 0
    assert len(list(read_episodes(tmp_path / "E/episodes"))) == 2


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (REWARD, "right"),
        ("def right(trajectory): return 1.0\ndef _helper(x): return x\n", "right"),
        (REWARD + "@reward\ndef wrong(trajectory): return 0.0\n", None),
        ("def a(trajectory): return 1.0\ndef b(trajectory): return 1.0\n", None),
        ("from json import loads\n", None),
    ],
)
def test_a_file_with_one_reward_needs_no_name(tmp_path, text, name):
    from agentrl.reward import resolve_rewards

    file = tmp_path / "r.py"
    file.write_text(text)
    if name is None:
        with pytest.raises(ConfigError, match=r"add the name of the object, as in .*r.py:Name"):
            resolve_rewards([str(file)])
        return
    for word, weight in ((str(file), 1.0), (f"{file}=0.5", 0.5)):
        (found,) = resolve_rewards([word])
        assert (found.name, found.weight) == (name, weight)
