"""Credentials in settings: used by the run and by its resumption, masked in everything that is written, printed or served."""

import os
import stat

import orjson
import pytest
from doubles import trajectory

from agentrl import __version__
from agentrl.cli.main import main
from agentrl.config import build_config, read_toml
from agentrl.config.credentials import read_credentials, write_credentials
from agentrl.core import redaction
from agentrl.core.redaction import is_secret_name, redact, remember, remember_environment
from agentrl.core.terminal_text import printable
from agentrl.errors import ConfigError, EngineFailure
from agentrl.run.run_log import RunLog
from agentrl.store import read_records
from agentrl.store.run_folder import RunFolder, settings_fingerprint
from agentrl.view.run_source import RunSource

SECRETS = ("hunter2", "s3cret-of-b", "key-of-judge", "token-in-query", "password-of-host")
SETTINGS = {
    "env_args": {
        "url": "http://me:hunter2@search:8000/retrieve",
        "judge_api_key": "key-of-judge",
        "judge": {"url": "https://judge/v1?model=a&access_token=token-in-query"},
        "pin_password": 12345678,
        "eos_token": "<|im_end|>",
        "max_tokens": 7,
    },
    "rollout_external_engine_addrs": ["a:s3cret-of-b@one:1", "http://me:hunter2@two:2"],
    "engine": "sglang",
    "opd_teacher": ["math=http://me:password-of-host@three:3"],
    "env": "lookup.py:Search",
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """What other tests remember is not masked here, and the reverse."""
    monkeypatch.setattr(redaction, "_of_settings", set())
    monkeypatch.setattr(redaction, "_of_environment", set())


@pytest.fixture
def settings(tmp_path):
    return {**SETTINGS, "run": str(tmp_path / "run"), "tensorboard": False}


def holds_a_secret(text):
    return [s for s in (*SECRETS, "12345678") if s in text]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://me:hunter2@host:8000/x does not answer", "http://***@host:8000/x does not answer"),
        ("https://TOKEN@host/x", "https://***@host/x"),
        ("http://me:p@ss@host/", "http://***@host/"),
        ("grpc://h/x?api_key=abc&b=1", "grpc://h/x?api_key=***&b=1"),
        ("'Authorization': 'Bearer abc.def'", "'Authorization': 'Bearer ***'"),
        ("x-api-key: abc", "x-api-key: ***"),
        ("http://host/a@b and me@example.org", "http://host/a@b and me@example.org"),
        ("authorization: denied; max_tokens=5&token=3", "authorization: denied; max_tokens=5&token=3"),
    ],
)
def test_credentials_are_recognised_by_their_form(text, masked):
    assert redact(text) == masked


def test_names_of_secrets():
    secret = "api_key API-KEY hf_token token password db.password client_secret auth aws_secret_access_key credentials"
    assert all(map(is_secret_name, secret.split()))
    plain = "input_key label_key max_tokens tokenizer author authority key_bindings secretary token_limit"
    assert not any(map(is_secret_name, plain.split()))


def test_known_values_are_masked_wherever_they_stand_and_not_inside_words():
    remember("me:hunter2%40home")
    remember("abc")
    assert redact("the password hunter2@home, hunter2%40home; abc") == "the password ***, ***; abc"
    assert redact("xhunter2@homey") == "xhunter2@homey"


def test_variables_of_the_environment_are_masked_where_no_policy_reads():
    remember_environment({"HF_TOKEN": "hf_0123456789", "HOME": "/home/someone", "PIN_TOKEN": "1234"})
    assert printable("hf_0123456789 /home/someone 1234") == "*** /home/someone 1234"
    assert str(EngineFailure("refused hf_0123456789")) == "refused ***"
    assert redact("hf_0123456789") == "hf_0123456789", "equal runs have equal texts, whatever the environment"


def test_a_run_keeps_credentials_in_a_file_of_its_owner_and_resumes_with_them(settings):
    umask = os.umask(0)
    try:
        folder = RunFolder.create(build_config(settings), __version__, resumable=True)
    finally:
        os.umask(umask)
    folder.close()
    text, secrets = (folder.path / "config.toml").read_text(), folder.path / "secrets.toml"
    assert not holds_a_secret(text)
    assert 'eos_token = "<|im_end|>"' in text
    assert "max_tokens = 7" in text
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    again = build_config(base=read_toml(folder.path / "config.toml"))
    assert again == build_config(settings)
    assert settings_fingerprint(again) == settings_fingerprint(build_config(settings))
    again.require_credentials()
    for file in folder.path.rglob("*"):
        assert file == secrets or not file.is_file() or not holds_a_secret(file.read_text())


def test_a_changed_credential_does_not_touch_the_one_that_config_toml_refers_to(settings, monkeypatch):
    """So a run that is killed while it rewrites its settings can be resumed."""
    folder = RunFolder.create(build_config(settings), __version__, resumable=True)
    folder.close()
    url = "http://me:changed-password@search:8000/retrieve"
    before, changed = (
        build_config(settings | {"env_args": SETTINGS["env_args"] | more}) for more in ({}, {"url": url})
    )
    write_credentials(
        folder.path / "secrets.toml", credentials_of(changed, read_credentials(folder.path / "secrets.toml"))
    )
    assert build_config(base=read_toml(folder.path / "config.toml")) == before
    RunFolder.reopen(folder.path, changed, __version__, {}).close()
    assert build_config(base=read_toml(folder.path / "config.toml")) == changed


def credentials_of(config, known):
    config.to_toml(credentials=known)
    return known


def test_a_run_without_credentials_has_no_such_file(tmp_path):
    folder = RunFolder.create(build_config({"run": str(tmp_path / "run"), "env_args": {"max_tokens": 3}}), __version__)
    folder.close()
    assert not (folder.path / "secrets.toml").exists()


def test_a_run_folder_without_its_credentials_can_be_read_and_not_resumed(settings, capsys):
    folder = RunFolder.create(build_config(settings), __version__, resumable=True)
    folder.close()
    (folder.path / "secrets.toml").unlink()
    config = build_config(base=read_toml(folder.path / "config.toml"))
    assert config.env.env_args["url"] == "http://${secret:env.env_args.url}@search:8000/retrieve"
    with pytest.raises(ConfigError, match=r"lacks: .*env\.env_args\.url.*; restore the file, or give"):
        config.require_credentials()
    again = RunFolder.reopen(folder.path, config, __version__, {})
    again.close()
    assert "${secret:env.env_args.url}" in (folder.path / "config.toml").read_text()


def test_a_link_in_place_of_the_file_is_not_followed(settings, tmp_path):
    folder = RunFolder.create(build_config(settings), __version__)
    folder.close()
    (folder.path / "secrets.toml").rename(tmp_path / "elsewhere.toml")
    (folder.path / "secrets.toml").symlink_to(tmp_path / "elsewhere.toml")
    assert read_toml(folder.path / "config.toml")["env_args"]["judge_api_key"].startswith("${secret:")


def test_names_and_titles_of_a_run_hold_no_credentials(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = build_config({"env": "openenv:http://me:hunter2@host:8000", "tensorboard": False})
    assert config.label == "openenv:http://***@host:8000"
    folder = RunFolder.create(config, __version__)
    folder.close()
    assert not holds_a_secret(str(folder.path))
    assert build_config(base=read_toml(folder.path / "config.toml")).env.env == config.env.env


def test_logs_and_the_terminal_mask_what_settings_hold(settings, tmp_path, capsys):
    build_config(settings)
    log = RunLog(tmp_path, "info", print)
    with pytest.raises(RuntimeError), log:
        raise RuntimeError("refused: a:s3cret-of-b, key-of-judge, password-of-host, 12345678, token-in-query, hunter2")
    written = (tmp_path / "run.log").read_text()
    assert "RuntimeError: refused: ***, ***, ***, ***, ***, ***" in written
    assert not holds_a_secret(written)


def test_an_error_message_shows_no_credential_of_a_flag(capsys):
    words = [
        "train",
        "--rollout-external-engine-addrs",
        "a:s3cret-of-b@one",
        "--engine",
        "sglang",
        "--env",
        "search_r1",
    ]
    assert main([*words, "--env-arg", "judge_api_key=key-of-judge"]) == 2
    said = "".join(capsys.readouterr())
    assert said
    assert not holds_a_secret(said)


def test_causes_and_errors_of_tools_are_recorded_without_credentials(settings):
    build_config(settings)
    failure = EngineFailure("http://me:hunter2@two:2/generate: refused key-of-judge", "engine: http://me:hunter2@two:2")
    assert str(failure) == "http://***@two:2/generate: refused ***"
    assert failure.cause == "engine: http://***@two:2"


def test_the_page_masks_what_an_older_run_recorded(tmp_path):
    folder = RunFolder.create(build_config({"run": str(tmp_path / "run"), "tensorboard": False}), __version__)
    folder.episodes.write(trajectory(), split="train", step=0)
    folder.close()
    with (folder.path / "config.toml").open("a") as file:
        file.write('\n# url = "http://me:hunter2@search:8000"\n')
    page = orjson.dumps(RunSource(folder.path).overview()).decode()
    assert "http://***@search:8000" in page
    assert not holds_a_secret(page)


ENV = """
from agentrl import InfraError, Task, ToolEnv, reward, tool

@reward
def one(trajectory):
    return 1.0

class Down(ToolEnv):
    action_format = "search_r1"
    rewards = (one,)

    def __init__(self, url, judge_api_key):
        self.url, self.key = url, judge_api_key

    @staticmethod
    def tasks(split):
        return [Task(f"t{n}", "question?", "x") for n in range(2)]

    @tool
    def search(self, query: str) -> str:
        \"\"\"Look something up.\"\"\"
        if "infra" in query:
            raise InfraError(f"{self.url} does not answer with key {self.key}")
        raise ValueError(f"{self.url} refuses {self.key}")
"""


def test_nothing_that_a_rollout_writes_or_prints_holds_a_credential(model, says, tmp_path, capsys):
    (tmp_path / "down.py").write_text(ENV)
    says(
        lambda r: (
            f"<search>{'infra' if r.session.startswith('0-') else 'x'}</search>" if not r.turn else "<answer>x</answer>"
        )
    )
    words = ["rollout", "--env", "down.py:Down", "--hf-checkpoint", model, "--run", "run", "--num-rollout", "1"]
    words += [
        "--rollout-batch-size",
        "2",
        "--n-samples-per-prompt",
        "2",
        "--max-failure-share",
        "1",
        "--max-retries",
        "0",
    ]
    words += ["--env-arg", "url=http://me:hunter2@search:8000", "--env-arg", "judge_api_key=key-of-judge"]
    assert main(words) == 0
    said = "".join(capsys.readouterr())
    assert "http://***@search:8000 does not answer with key ***" in said
    assert not holds_a_secret(said)
    records = b"".join(map(orjson.dumps, read_records(tmp_path / "run" / "episodes"))).decode()
    assert "http://***@search:8000 does not answer with key ***" in records
    assert "ValueError: http://***@search:8000 refuses ***" in records, "what the policy reads of a tool's error"
    assert not holds_a_secret(records)
    for file in (tmp_path / "run").rglob("*"):
        assert (
            not file.is_file() or file.name == "secrets.toml" or not holds_a_secret(file.read_bytes().decode("latin-1"))
        )
