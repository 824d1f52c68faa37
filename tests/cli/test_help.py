"""Help: `--help` fits on a page, `--help-all` lists every flag, `help FLAG` explains each."""

import argparse
import contextlib
import subprocess
import sys

import pytest

from agentrl.cli.common import Commands
from agentrl.cli.flag_advice import flag_tables
from agentrl.cli.flags import BASIC, metavar, summary
from agentrl.cli.help_command import explain
from agentrl.cli.main import main, make_parser
from agentrl.config import FIELDS, SECTIONS
from agentrl.config.describe import choices, default_text, flag_names, plain_type, setting

WITH_SETTINGS = ("train", "rollout", "eval", "sft", "replay", "rescore", "fork")


def printed(capsys, *words):
    with contextlib.suppress(SystemExit):  # argparse exits after --help
        assert main([*words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", make_parser()[1])
def test_help_fits_on_a_page(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "300")
    text = printed(capsys, command, "--help").splitlines()
    assert len(text) <= (60 if command == "train" else 66)
    assert max(map(len, text)) <= 100


def test_help_shows_the_twenty_basic_flags(capsys):
    text = printed(capsys, "train", "--help")
    shown = {name for name in FIELDS if f"\n  {flag_names(name)[0]} " in text}
    assert shown == BASIC
    assert len(BASIC) == 20
    for hint in ("--help-all", "agentrl help FLAG", "--resume RUN", "--config FILE.toml"):
        assert hint in text


def test_help_is_fast():
    """It imports neither torch nor megatron-core, which take seconds."""
    code = (
        "import sys\nfrom agentrl.cli.main import main\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'sglang')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("command", WITH_SETTINGS)
def test_all_flags_are_listed_by_section(capsys, command):
    text = " ".join(printed(capsys, command, "--help-all").split())
    for section in SECTIONS:
        assert f"[{section}] " in text
    for name in FIELDS:
        flag, value = flag_names(name)[0], metavar(setting(name))
        assert f" {flag} " in text, name
        if isinstance(value, str) and plain_type(setting(name).annotation) is not bool:
            assert f"{flag} {value}" in text, name


@pytest.mark.parametrize("name", FIELDS)
def test_each_setting_is_explained_in_full(capsys, name):
    info = setting(name)
    text = printed(capsys, "help", flag_names(name)[0])
    assert text == printed(capsys, "help", name)
    assert "\n  type:     " in text
    assert f"\n  default:  {default_text(info)}\n" in text
    assert f"\n  TOML:     [{FIELDS[name]}] {name}" in text
    assert " ".join((info.description or "").split()) in " ".join(text.split())
    for choice in choices(info.annotation):
        assert choice in text
    assert f"(default: {default_text(info)})" in summary(info)
    assert max(map(len, text.splitlines())) <= 100


def test_the_value_of_a_flag_says_its_type():
    names = {int: "N", float: "F", bool: "true|false"}
    for name in FIELDS:
        info, value = setting(name), metavar(setting(name))
        if choices(info.annotation):
            assert value == "{" + ",".join(choices(info.annotation)) + "}"
        elif plain_type(info.annotation) in names:
            assert value == names[plain_type(info.annotation)]
        else:
            assert value
            assert value != "TEXT"


def test_one_flag(capsys):
    assert printed(capsys, "help", "--kl-loss-type").splitlines() == [
        "--kl-loss-type {k1,k2,k3,low_var_kl}",
        "",
        "  estimator of the KL divergence, from Schulman 2020; low_var_kl is k3 with bounds",
        "",
        "  type:     one of k1, k2, k3, low_var_kl",
        "  default:  k3",
        "  TOML:     [train] kl_loss_type",
    ]
    assert "  bounds:   at least 0\n" in printed(capsys, "help", "lr")
    assert printed(capsys, "help", "model").startswith("--hf-checkpoint, --model PATH|NAME\n")
    assert "  command:  agentrl train\n" in printed(capsys, "help", "--resume")


def test_flags_of_a_service_are_explained(capsys):
    assert printed(capsys, "help", "use-wandb") == "--use-wandb means --trackers wandb here\n"
    for name, variable in flag_tables().environment.items():
        assert printed(capsys, "help", name) == f"--{name} VALUE sets the environment variable {variable}\n"


def test_a_refused_flag_is_explained_with_the_advice(capsys):
    assert printed(capsys, "help", "rm-url") == f"--rm-url is not accepted: {flag_tables().refused['rm-url']}\n"
    for name, instead in flag_tables().refused.items():
        assert explain(name, Commands(argparse.ArgumentParser(), ())) == f"--{name} is not accepted: {instead}"


def test_a_flag_that_means_one_of_ours_is_explained_as_that(capsys):
    for name in ("num-generations", "max-grad-norm"):
        text = printed(capsys, "help", f"--{name}")
        assert text == f"--{name} means --{flag_tables().same[name]} here\n\n" + printed(
            capsys, "help", flag_tables().same[name]
        )


def test_a_flag_of_megatron_is_explained(capsys):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    text = printed(capsys, "help", "--weight-decay")
    for line in ("--weight-decay VALUE", "type:     a number", "default:  0.01", "TOML:     [megatron] weight_decay"):
        assert line in text
    assert "cannot be set: it follows from --dtype" in printed(capsys, "help", "bf16")
    text = printed(capsys, "help", "recompute-granularity")
    assert "choices:  full, selective" in text
    assert "sets recompute_granularity = selective" in printed(capsys, "help", "recompute-activations")


def test_a_flag_of_sglang_is_explained(capsys, monkeypatch):
    from agentrl.engine.sglang import installation, server_flags

    flag = {"type": "float", "choices": None, "default": 0.9, "help": "its share"}
    found = installation.Installation(python=sys.executable, version="0.5.9")
    monkeypatch.setattr(installation, "find_installation", lambda: found)
    monkeypatch.setattr(server_flags, "server_flags", lambda _: {"mem-fraction-static": flag})
    text = printed(capsys, "help", "sglang-mem-fraction-static")
    for line in ("its share", "type:     float", "default:  0.9", "TOML:     [sglang] mem_fraction_static"):
        assert line in text
    assert "not accepted: give --dtype" in printed(capsys, "help", "--sglang-dtype")
    assert main(["help", "sglang-mem-fraction"]) == 2
    assert "SGLang 0.5.9 has no flag --mem-fraction; did you mean" in capsys.readouterr().err


def test_a_command_is_explained_as_with_help(capsys):
    assert "--html FILE.html" in printed(capsys, "help", "export")
    assert "usage: agentrl train" in printed(capsys, "help", "train")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["kl-loss-typ"], "agentrl help: unknown flag --kl-loss-typ; did you mean 'kl-loss-type'"),
        (["--resum"], "agentrl help: unknown flag --resum; did you mean 'resume'"),
        (["--xyzzy"], "agentrl help: unknown flag --xyzzy; `agentrl train --help-all` lists all flags"),
        (["lr", "seed"], "agentrl help: unexpected 'seed'"),
        ([], "agentrl help: name a flag or a command"),
    ],
)
def test_what_cannot_be_explained(capsys, words, says):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    assert main(["help", *words]) == 2
    assert says in capsys.readouterr().err
