"""Settings: layers merge, unknown names suggest, contradictions are one sentence, a written file reads back equal."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.cli.flags import complete_switches
from agentrl.config import FIELDS, SECTIONS, Config, EnvSettings, RunSettings, TrainSettings, build_config, read_toml
from agentrl.config.describe import describe_bounds, is_optional, plain_type
from agentrl.config.paths import anchor
from agentrl.config.settings import ESTIMATOR_NAMES, TABLES, field_infos
from agentrl.data.data_files import load_tasks
from agentrl.env import make_env_class
from agentrl.errors import ConfigError
from agentrl.reward import resolve_rewards
from agentrl.store.run_folder import next_free, settings_fingerprint


def toml(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_the_defaults_hold():
    config = build_config()
    assert config == Config()
    assert config.global_batch_size == 16 * 8


def test_field_names_are_unique_over_sections_so_that_each_is_a_flag():
    assert len(FIELDS) == sum(len(dataclasses.fields(cls)) for cls in SECTIONS.values())


def test_later_layers_win_and_tables_merge_by_key():
    config = build_config(
        {"seed": 1, "env_args": {"a": 1, "b": 1}, "megatron": {"num_layers": 2}},
        {"seed": "2", "env_args": {"b": 2}, "megatron": {"bf16": True}},
    )
    assert config.run.seed == 2
    assert config.env.env_args == {"a": 1, "b": 2}
    assert config.megatron == {"num_layers": 2, "bf16": True}


def test_layers_are_not_changed_by_merging():
    first = {"env_args": {"a": 1}}
    build_config(first, {"env_args": {"b": 2}})
    assert first == {"env_args": {"a": 1}}


def test_the_batch_equation_prints_both_sides():
    with pytest.raises(ConfigError, match=r"4 × 8 = 32, but 10 × 3 = 30"):
        build_config(
            {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "global_batch_size": 10, "num_steps_per_rollout": 3}
        )
    with pytest.raises(ConfigError, match=r"4 × 8 = 32, but 10 × 3 = 30"):  # from the equation, with a remainder
        build_config({"rollout_batch_size": 4, "n_samples_per_prompt": 8, "num_steps_per_rollout": 3})
    assert (
        build_config({"rollout_batch_size": 4, "n_samples_per_prompt": 8, "num_steps_per_rollout": 2}).global_batch_size
        == 16
    )


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"rollout_batchsize": 4}, "did you mean 'rollout_batch_size'"),
        ({"seed": "x"}, "--seed must be an integer, found 'x'"),
        ({"seed": 1 << 70}, "--seed must be at least 0 and below 2\\*\\*63, found 1180591620717411303424"),
        ({"num_rollout": 1.5}, "--num-rollout must be an integer, found 1.5"),
        ({"eval_limit": "many"}, "--eval-limit must be an integer or none, found 'many'"),
        ({"lr": "fast"}, "--lr must be a number, found 'fast'"),
        ({"colocate": "maybe"}, "--colocate must be true or false, found 'maybe'"),
        ({"env": 3}, "--env must be text or none, found 3"),
        ({"reward": "em"}, "--reward must be a list, found 'em'"),
        ({"reward": [1]}, "--reward must be a list of text, found 1"),
        (
            {"advantage_estimator": "grop"},
            f"--advantage-estimator must be one of {', '.join(ESTIMATOR_NAMES)}, or file.py:function, found grop",
        ),
        ({"weight_sync": "x"}, "--weight-sync must be one of colocated, split, disk or none, found 'x'"),
        ({"eval_prompt_data": ["a"]}, "takes pairs of NAME and PATH, found an odd number of values: 1"),
        ({"eval_prompt_data": ["a", "x", "b", "y", "a", "z"]}, "two sets with the name 'a'"),
        ({"seed": 10**22}, "--seed must be at least 0 and below 2\\*\\*63, found 10000000000000000000000"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"env_args": "a=1"}, "--env-args must be a table, found 'a=1'"),
        ({"rollout_temperature": 0}, "--rollout-temperature must be above 0, found 0: greedy sampling"),
        ({"rollout_top_p": 0.9}, "--allow-truncated-sampling"),
        ({"rollout_top_k": 5}, "--allow-truncated-sampling"),
        ({"rollout_top_p": 0, "allow_truncated_sampling": True}, "--rollout-top-p must be above 0 and at most 1"),
        ({"rollout_top_k": 0}, "--rollout-top-k must be at least 1, or -1"),
        ({"kl_loss_coef": 0.1}, "--use-kl-loss"),
        ({"apply_chat_template": False}, "--apply-chat-template false gives a prompt unchanged to a function"),
        ({"max_failure_share": 1.5}, "--max-failure-share must be at least 0 and at most 1, found 1.5"),
        ({"lr": "-1"}, "--lr must be at least 0, found -1"),
        ({"num_steps_per_rollout": 0}, "--num-steps-per-rollout must be at least 1, found 0"),
        ({"global_batch_size": 0}, "--global-batch-size must be at least 1, found 0"),
    ],
    ids=str,
)
def test_an_invalid_setting_is_one_sentence_that_names_the_flag(layer, message):
    with pytest.raises(ConfigError, match=message) as e:
        build_config(layer)
    assert "\n" not in str(e.value)


INFOS = {name: info for cls in SECTIONS.values() for name, info in field_infos(cls).items()}
NUMBERS = {name: info for name, info in INFOS.items() if plain_type(info.annotation) in (int, float)}
LOWER = [
    (name, key, getattr(bound, key))
    for name, info in NUMBERS.items()
    for bound in info.metadata
    for key in ("ge", "gt")
    if hasattr(bound, key)
]


@pytest.mark.parametrize(("name", "key", "bound"), LOWER)
def test_bounds(name, key, bound):
    below = bound - 1 if key == "ge" else bound
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} must be (at least|above) {bound}.*, found {below}$"):  # fmt: skip
        build_config({name: below})
    with pytest.raises(ConfigError, match=f"found {below}$"):
        build_config({name: str(below)})


@pytest.mark.parametrize("name", [n for n, info in NUMBERS.items() if plain_type(info.annotation) is float])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_must_be_finite(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be a finite number, found {value}"):
        build_config({name: value})


def test_every_number_has_a_bound():
    assert [name for name, info in NUMBERS.items() if not info.metadata] == []
    assert describe_bounds(INFOS["max_failure_share"]) == "at least 0 and at most 1"
    in_validators = {"rollout_temperature", "rollout_top_k", "eval_top_k"}
    assert {name for name, info in NUMBERS.items() if not describe_bounds(info)} == in_validators


# What is accepted and refused must not change: config.toml files and command lines rely on it.
@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        *[("tensorboard", v, True) for v in (True, "true", "True", "yes", "on", "t", "y", "1", 1)],
        *[("tensorboard", v, False) for v in (False, "false", "no", "off", "f", "n", "0", 0)],
        *[("seed", v, 7) for v in (7, 7.0, "7", "+7", " 7 ", "0_7")],
        ("seed", True, 1),
        *[("lr", v, 1.0) for v in (1, 1.0, "1", "1e0", True)],
        ("eval_limit", None, None),
        ("eval_limit", "none", None),
        ("run", "none", None),
        ("env", "none", None),
        ("engine", "local", "local"),
        ("reward", ["a"], ("a",)),
        ("reward", ("a", "b"), ("a", "b")),
    ],
)
def test_values_that_are_converted(name, given, value):
    found = getattr(getattr(build_config({name: given}), FIELDS[name]), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *[("tensorboard", v) for v in (2, "2", "maybe", "", None, [True])],
        *[("seed", v) for v in ("1.5", 1.5, "", "x", None, [1])],
        *[("lr", v) for v in ("x", "", None, [1.0])],
        *[("run", v) for v in (3, True, ["a"])],
        *[("reward", v) for v in ("a", [1], None, {"a": 1})],
        ("env_args", [("a", 1)]),
    ],
)
def test_values_that_are_refused(name, given):
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} must be"):
        build_config({name: given})


def test_settings_built_in_code_are_not_converted():
    for cls, name, value in ((RunSettings, "seed", "1"), (TrainSettings, "lr", "1"), (EnvSettings, "reward", ["em"])):
        with pytest.raises(ValidationError):
            cls(**{name: value})


def test_settings_are_ordinary_dataclasses():
    config = build_config({"lr": 0.5, "env_args": {"a": [1]}})
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    changed = dataclasses.replace(config, train=dataclasses.replace(config.train, lr=0.25))
    assert (changed.train.lr, config.train.lr) == (0.25, 0.5)
    assert [f.name for f in dataclasses.fields(config.sft)] == ["sft_epochs", "sft_batch_size"]
    assert dataclasses.asdict(config.sft) == {"sft_epochs": 1, "sft_batch_size": 64}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.lr = 1.0


def test_the_fingerprint_of_recorded_settings_does_not_change():
    given = {"lr": 0.1, "log_level": "error", "env_args": {"a": 1}, "eval_prompt_data": ["a", "b"]}
    example = {"env": "search_r1", "hf_checkpoint": "search_r1_3m"}
    assert settings_fingerprint(build_config(example)) == "af5d00d4c2e15927"
    assert settings_fingerprint(build_config(example, given)) == "009c947ec1febb85"


def test_settings_import_no_torch():
    code = "import sys, agentrl.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WITHOUT_EFFECT = [
    # settings, and those with which the first has an effect
    ({"rollout_num_gpus_per_engine": 2, "engine": "local"}, {"engine": "sglang"}),
    ({"update_weight_buffer_size": 1 << 20, "engine": "local"}, {"engine": "sglang"}),
    ({"engine_max_running": 4, "engine": "sglang"}, {"engine": "local"}),
    ({"update_weight_buffer_size": 1 << 20, "engine": "sglang", "weight_sync": "disk"}, {"weight_sync": "split"}),
    *[
        ({name: value, "engine": "sglang", "rollout_external_engine_addrs": ["h:1"]}, {"rollout_external_engine_addrs": []})
        for name, value in {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "engine_python": "p", "engine_pythonpath": "q"}.items()
    ],
    (
        {"rollout_min_num_gpus": 1, "engine": "sglang", "ray_address": "auto", "rollout_external_engine_addrs": ["h:1"]},
        {"rollout_external_engine_addrs": []},
    ),
    ({"tis_threshold": 3.0}, {"use_tis": True}),
    ({"kl_loss_type": "k2"}, {"use_kl_loss": True}),
    ({"use_unbiased_kl": True}, {"use_kl_loss": True}),
    *[({name: value}, {"use_tis": True}) for name, value in {"tis_level": "turn", "tis_mode": "mask", "tis_clip_low": 0.5}.items()],
    ({"rejection_low": 0.1}, {"rejection_level": "episode"}),
    ({"rejection_high": 9.0}, {"rejection_level": "episode"}),
    ({"opd_kl_coef": 0.5}, {"opd_teacher": ["d"]}),
    ({"overlong_penalty_factor": 2.0}, {"overlong_buffer_len": 16}),
    ({"gamma": 0.9}, {"advantage_estimator": "reinforce_plus_plus"}),
    ({"gigpo_step_weight": 0.5}, {"advantage_estimator": "gigpo"}),
    *[
        ({name: value}, {"advantage_estimator": "ppo"})
        for name, value in {"lambd": 0.9, "critic_lr": 0.1, "critic_load": "d", "value_clip": 0.5, "num_critic_only_steps": 2}.items()
    ],
    ({"eps_clip_c": 3.0, "advantage_estimator": "cispo"}, {"advantage_estimator": "grpo"}),
    ({"kl_loss_coef": 0.1}, {"use_kl_loss": True}),
    ({"distributed_timeout_minutes": 2, "trainer_timeout_s": 100}, {"trainer_timeout_s": 120}),
    ({"lora_alpha": 8.0}, {"lora_rank": 2}),
    ({"lora_dropout": 0.1}, {"lora_rank": 2}),
    ({"lora_target_modules": ["q_proj"]}, {"lora_adapter_path": "d"}),
    ({"input_key": "question"}, {"prompt_data": "a.jsonl"}),
    ({"label_key": "answer"}, {"eval_prompt_data": ["a", "a.jsonl"]}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "more"), WITHOUT_EFFECT, ids=lambda s: "-".join(s))
def test_a_setting_without_effect_is_refused_where_it_was_given(settings, more):
    name = next(iter(settings))
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} ") as e:
        build_config(settings)
    assert "\n" not in str(e.value)
    build_config(settings, more)
    if "has no effect" in str(e.value) and name != "kl_loss_coef":
        build_config(base=settings)  # recorded, or recommended by an environment


def test_a_setting_without_effect_is_accepted_at_its_default():
    for settings, more in WITHOUT_EFFECT:
        name = next(iter(settings))
        build_config(settings | {name: field_infos(SECTIONS[FIELDS[name]])[name].default}, {})
        assert more


# -- TOML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rollout]\nseed = 3", r"unknown key 'seed' in \[rollout\]; it belongs in \[run\]"),
        ("seed = 3", r"'seed' is outside any section; it belongs in \[run\]"),
        ("[rollout]\nconcurency = 3", "did you mean 'concurrency'"),
        ("[rolout]\nconcurrency = 3", "did you mean 'rollout'"),
        ("rollout = 3", r"'rollout' is a section"),
        ("megatron = 3", r"'megatron' is a section"),
        ("[run", "not TOML"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_what_to_do(tmp_path, text, message):
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as e:
        read_toml(path)
    assert str(path) in str(e.value)


def test_a_file_that_is_missing_or_not_text(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        read_toml(tmp_path / "c.toml")


def test_a_byte_order_mark_is_read_over(tmp_path):
    assert read_toml(toml(tmp_path, "\ufeff[run]\nseed = 3")) == {"seed": 3}


def test_a_file_is_a_flat_layer(tmp_path):
    layer = read_toml(
        toml(tmp_path, "[run]\nseed = 3\n[env.env_args]\ntopk = 5\n[megatron]\ntensor_model_parallel_size = 2")
    )
    assert layer == {"seed": 3, "env_args": {"topk": 5}, "megatron": {"tensor_model_parallel_size": 2}}


SOME = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**40),
        "run": st.none() | st.text("abc/-", min_size=1),
        "tensorboard": st.booleans(),
        "env_args": st.dictionaries(
            st.text("ab", min_size=1),
            st.none() | st.integers().filter(lambda i: abs(i) < 2**60) | st.text(max_size=3) | st.lists(st.booleans()),
        ),
        "reward": st.lists(st.text("xy=1", min_size=1), max_size=3),
        "eval_interval": st.integers(0, 50),
        "eval_limit": st.none() | st.integers(1, 50),
        "max_tokens_per_turn": st.none() | st.integers(1, 500),
        "lr": st.floats(0, 1),
        "truncated_episodes": st.sampled_from(["train", "mask", "drop"]),
        "megatron": st.dictionaries(st.text("ab_", min_size=1), st.integers(0, 5) | st.booleans()),
        "eval_prompt_data": st.just(("nq", "nq.jsonl@[0:5]")),
    },
)


@given(SOME)
def test_to_toml_reads_back_equal(tmp_path_factory, layer):
    config = build_config(layer)
    again = build_config(read_toml(toml(tmp_path_factory.mktemp("c"), config.to_toml())))
    assert again == config


TABLE_OF_NONES = {
    "a": None,
    "b": {"c": None, "d": 1, "e.f": None},
    "g": [{"h": None, "i": [{"j": None}]}, 2],
    "k": "none",
}


def read_back(folder, config):
    return build_config(base=read_toml(toml(folder, config.to_toml())))


@pytest.mark.parametrize("name", [n for n, info in INFOS.items() if is_optional(info.annotation) and not info.exclude])
def test_a_setting_of_none_is_read_back(tmp_path, name):
    section = getattr(Config(), FIELDS[name])
    config = dataclasses.replace(Config(), **{FIELDS[name]: dataclasses.replace(section, **{name: None})})
    assert read_back(tmp_path, config) == config


@pytest.mark.parametrize(
    "name", [*TABLES, *(n for n, info in INFOS.items() if info.annotation == dict[str, Any] and n != "env_settings")]
)
@pytest.mark.parametrize("table", [{"limit": None}, TABLE_OF_NONES], ids=["one", "nested"])
def test_none_inside_a_table_is_read_back(tmp_path, name, table):
    config = build_config(base={"env": "x", "context_policy": "summarise", name: table})
    again = read_back(tmp_path, config)
    assert again == config
    assert (getattr(again, name) if name in TABLES else getattr(getattr(again, FIELDS[name]), name)) == table


def test_none_in_the_settings_of_one_of_several_environments_is_read_back(tmp_path):
    config = build_config(base={"env": "a=1 b=1", "env_settings": {"a.env_args": {"limit": None}}})
    assert read_back(tmp_path, config) == config


@pytest.mark.parametrize(
    "places",
    [
        "3",
        "[3]",
        "['limit']",
        "[['env_args']]",
        "[['env_args', 'x']]",
        "[['x', 'y']]",
        "[['env_args', 'x', 'y']]",
        "[['seed', 'x']]",
    ],
)
def test_places_of_none_that_are_not_in_a_table_are_refused(tmp_path, places):
    with pytest.raises(
        ConfigError, match=r"must list places inside tables of this file where a value is None, such as"
    ):
        read_toml(toml(tmp_path, f"none = {places}\n[run]\nseed = 1\n[env]\nenv_args = {{ x = 1 }}\n"))


def test_the_log_level_is_not_recorded():
    config = build_config({"log_level": "debug"})
    assert config.run.log_level == "debug"
    assert config.to_toml() == Config().to_toml()
    assert "log_level" not in config.to_toml()


def test_none_can_be_written_in_a_file_and_on_the_command_line():
    assert build_config({"eval_limit": "none"}).eval.eval_limit is None
    assert tomllib.loads(build_config({"eval_limit": "none"}).to_toml())["eval"]["eval_limit"] == "none"
    with pytest.raises(ConfigError, match="--seed"):
        build_config({"seed": "none"})


def test_every_setting_has_help():
    for name, info in INFOS.items():
        first, *_ = (info.description or "").split("\n\n")
        assert len(first.split()) >= 2, name
        assert "\n" not in first, name
        if info.get_default(call_default_factory=True) in (None, (), {}):
            assert "(default: " in first, name


def test_paths_that_exist_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("envs/mine.py", "data/q.jsonl", "python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "weights").mkdir()
    given = {
        "hf_checkpoint": "envs", "env": "envs/mine.py:Mine", "reward": ["envs/mine.py:right=0.5", "em", "pkg.mod:fn=2"],
        "prompt_data": "data/q.jsonl@[2:5]", "eval_prompt_data": ["data", "data/q.jsonl", "other", "no/such"],
        "engine": "sglang", "engine_python": "python", "update_weight_disk_dir": "weights", "env_args": {"corpus": "data/q.jsonl"},
        "lora_rank": 4, "lora_adapters": {"envs/mine.py:Mine": "red", "first": "blue"},
    }  # fmt: skip
    found = anchor(build_config(given))
    assert (found.model.hf_checkpoint, found.env.env) == (f"{tmp_path}/envs", f"{tmp_path}/envs/mine.py:Mine")
    assert found.env.reward == (f"{tmp_path}/envs/mine.py:right=0.5", "em", "pkg.mod:fn=2")
    assert found.data.prompt_data == f"{tmp_path}/data/q.jsonl@[2:5]"
    assert found.eval.eval_prompt_data == ("data", f"{tmp_path}/data/q.jsonl", "other", "no/such")
    assert (found.engine.engine_python, found.engine.engine_pythonpath) == (f"{tmp_path}/python", None)
    assert found.engine.update_weight_disk_dir == f"{tmp_path}/weights"
    assert found.env.env_args == {"corpus": "data/q.jsonl"}, "only the environment knows what its arguments are"
    assert found.lora.lora_adapters == {f"{tmp_path}/envs/mine.py:Mine": "red", "first": "blue"}
    assert anchor(found) == found
    assert anchor(build_config({"hf_checkpoint": "envs"}), embedded=["envs"]).model.hf_checkpoint == "envs"
    assert anchor(build_config({"hf_checkpoint": ""})).model.hf_checkpoint == ""
    assert anchor(Config()) == Config()


@pytest.mark.parametrize("folder", ["lr=0.1", "at 12:30", "a.py", "x.py=1", "y.py:Z=2", "q@[1:2]"])
def test_a_path_may_contain_characters_that_separate_elsewhere(tmp_path, monkeypatch, folder):
    where = tmp_path / folder
    where.mkdir()
    monkeypatch.chdir(where)
    (where / "mine.py").write_text(
        "from agentrl import Env\nclass Mine(Env): pass\ndef right(trajectory): return 1.0\n"
    )
    (where / "q.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    given = {"env": "mine.py:Mine", "reward": ["mine.py:right=0.5"], "prompt_data": "q.jsonl@[1:]"}
    found = anchor(build_config(given))
    assert (found.env.env, found.env.reward) == (f"{where}/mine.py:Mine", (f"{where}/mine.py:right=0.5",))
    assert found.data.prompt_data == f"{where}/q.jsonl@[1:]"
    monkeypatch.chdir(tmp_path)
    assert make_env_class(found.env.env).__name__ == "Mine"
    (reward,) = resolve_rewards(found.env.reward)
    assert (reward.name, reward.weight) == ("right", 0.5)
    tasks = load_tasks(found.data.prompt_data, input_key="prompt", label_key="prompt")
    assert [t.prompt for t in tasks] == ["b", "c"]
    assert next_free(tmp_path, found.env.env) == tmp_path / "mine-Mine-001"


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("search_r1", "search_r1"),
        ("/a/b.c/mine.py", "mine"),
        ("x/mine.py:Mine", "mine-Mine"),
        ("pkg.mod:Mine", "pkg-mod-Mine"),
        ("a.python:B", "a-python-B"),
        ("at=12:30/mine.py", "mine"),
    ],
)
def test_the_name_of_a_run_folder(tmp_path, name, folder):
    assert next_free(tmp_path, name) == tmp_path / f"{folder}-001"


def test_a_bare_switch_gets_its_value():
    words = "replay --keep-whole-outputs RUN --tensorboard false --colocate --lr 1".split()
    assert (
        complete_switches(words)
        == "replay --keep-whole-outputs=true RUN --tensorboard false --colocate=true --lr 1".split()
    )
    assert complete_switches(["--colocate"]) == ["--colocate=true"]
    assert complete_switches(["--colocate", "t"]) == ["--colocate", "t"]
    assert complete_switches(["--colocate", "Yes"]) == ["--colocate", "Yes"]


@pytest.mark.parametrize("value", [[1, None], {"y": [[None]]}, object(), b"x"])
def test_a_value_that_config_toml_cannot_hold_is_refused(value):
    with pytest.raises(ConfigError, match=r"--env-args must hold values that config\.toml can hold"):
        build_config({"env_args": {"x": value}})
    assert "x = 1" in build_config({"env_args": {"x": 1, "y": [{"z": 2.0}]}}).to_toml()
