"""Settings and arguments, mutated: they take effect as written, or each is refused in a sentence with exit status 2."""

import contextlib
import io
from random import Random

import pytest
import tomli_w

from agentrl.cli import main as cli
from agentrl.config import FIELDS, build_config
from agentrl.config.load import read_toml
from agentrl.errors import UsageError
from fuzz.mutations import FULL, QUICK, odd

NAMES = sorted(FIELDS)
PIECES = (b"", b"\x00", b"\xff", b"[", b'"', b"=", b"\n", b"{" * 2000, b"9" * 5000, b"[" * 3000)
COMMANDS = (
    "train",
    "rollout",
    "eval",
    "check",
    "replay",
    "rescore",
    "fork",
    "view",
    "export",
    "convert",
    "tokens",
    "sft",
    "help",
)


def layer(random):
    return {random.choice(NAMES): odd(random) for _ in range(random.choice((1, 1, 2)))}


@pytest.mark.parametrize("cases", [QUICK, pytest.param(FULL, marks=pytest.mark.full)])
def test_a_setting_is_taken_as_written_or_refused(tmp_path, cases):
    taken, sentences = 0, []
    for seed in range(cases):
        random = Random(seed)
        wrong = layer(random)
        try:
            config = build_config(wrong)
        except UsageError as e:
            sentences.append(str(e))
            continue
        taken += 1
        path = tmp_path / "config.toml"
        text = config.to_toml() if hasattr(config, "to_toml") else None
        if text is not None:
            path.write_text(text)
            assert build_config(base=read_toml(path)) == config, (seed, wrong)
    assert taken
    assert all(sentences)


@pytest.mark.parametrize("cases", [QUICK, pytest.param(FULL, marks=pytest.mark.full)])
def test_a_settings_file_is_read_or_refused(tmp_path, cases):
    path = tmp_path / "config.toml"
    good = tomli_w.dumps(
        {"run": {"seed": 1}, "rollout": {"num_rollout": 3, "rollout_temperature": 0.7}, "env": {"env_args": {"a": [1]}}}
    ).encode()
    for seed in range(cases):
        random = Random(seed)
        data = bytearray(good)
        for _ in range(random.randrange(1, 4)):
            at = random.randrange(len(data))
            data[at : at + random.randrange(3)] = random.choice(
                (b"", b"\x00", b"\xff", b"[", b'"', b"=", b"\n", b"{" * 2000, b"9" * 5000, b"[" * 3000)
            )
        path.write_bytes(data)
        with contextlib.suppress(UsageError):
            build_config(read_toml(path))


@pytest.mark.parametrize("cases", [QUICK // 4, pytest.param(FULL, marks=pytest.mark.full)])
def test_arguments_are_refused_in_a_sentence(tmp_path, monkeypatch, cases):
    monkeypatch.chdir(tmp_path)
    for seed in range(cases):
        random = Random(seed)
        flags = [f"--{random.choice(NAMES).replace('_', '-')}" for _ in range(random.randrange(1, 3))]
        words = [
            random.choice(COMMANDS),
            str(odd(random)).replace("\x00", ""),
            *flags,
            str(odd(random)),
            f"--{odd(random)!s:.40}",
        ]
        random.shuffle(words)
        if random.random() < 0.8:
            words = [random.choice(COMMANDS), "--no-such-flag", *words]
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                status = cli.main(words)
            except SystemExit as e:  # --help, --version
                status = e.code
        assert status in (0, 2), (seed, words, said.getvalue()[-300:])
        assert "Traceback" not in said.getvalue(), (seed, words)
