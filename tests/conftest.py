"""What holds for all tests: quick ones first, those this machine cannot run skipped with a reason, one hypothesis profile.

And a small byte-level BPE tokenizer with a ChatML template, with renderers over it. No torch.
"""

import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, settings
from tokenizers import decoders, models, pre_tokenizers, trainers

from agentrl.render import Renderer, Tokenizer, make_renderer

sys.path.insert(0, str(Path(__file__).parent))  # for `doubles` and the like

import processes
from hypothesis_examples import MORE

settings.register_profile(
    "default", max_examples=50 * MORE, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

NEEDS = {
    "gpu": (shutil.which("nvidia-smi") is not None, "needs a CUDA GPU"),
    "sglang": (
        importlib.util.find_spec("sglang") is not None
        or Path(".venv-sglang/bin/python").exists()
        or any(os.environ.get(name) for name in ("AGENTRL_SGLANG", "AGENTRL_SGLANG_PYTHON")),
        "needs SGLang: make setup-sglang-cpu",
    ),
}
NO_SKIPS = bool(os.environ.get("AGENTRL_NO_SKIPS"))
"""set by .ci/run: a skipped test fails, unless its reason is one of these"""
MAY_SKIP = {
    "needs a CUDA GPU": "no machine that runs .ci/run needs one",
    "needs two GPUs": "likewise",
    "needs Linux namespaces": "some containers offer none; the sandbox then says so, which is tested",
    "needs the package datasets": "a large package for one test; the one beside it holds what types of columns it can read",
    "scripted servers have no cache": "a contract test that has no meaning for one of its engines",
    "the model's answer has no plain text": "what a real model answers is not ours to choose",
}
LATE = ("slow", "gpu", "sglang", "full")
ZOMBIES = pytest.StashKey[set[int]]()
"""children of the test process that have ended unreaped, each reported once"""


def pytest_collection_modifyitems(items):
    for item in items:
        for marker, (there, reason) in NEEDS.items():
            if not there and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: max((i for i, m in enumerate(LATE, 1) if item.get_closest_marker(m)), default=0))


def pytest_sessionstart(session):
    os.environ[processes.MARK] = f"{os.getpid()}-{time.time_ns()}"
    session.config.stash[ZOMBIES] = processes.zombies()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """A test waits for the processes that it starts."""
    try:
        return (yield)
    finally:
        known = item.config.stash[ZOMBIES]
        new = processes.lasting_zombies(known)
        known |= new
        if new:
            pytest.fail(f"the test left {len(new)} child processes that nobody waited for", pytrace=False)


def pytest_sessionfinish(session):
    """No process of a test runs when all tests are done."""
    running = processes.strays(os.environ[processes.MARK])
    for pid, what in running.items():
        print(f"\nERROR: process {pid} still runs, started in {what}", file=sys.stderr)
    if running:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return no_skip((yield))


def no_skip(report):
    """Where nothing may be skipped silently, a skip without a reason we know is a failure."""
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in MAY_SKIP:
            report.outcome = "failed"
            report.longrepr = f"skipped, which AGENTRL_NO_SKIPS forbids: {reason}"
    return report


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""control tokens"""
TAGS = tuple(f"<{end}{t}>" for t in ("search", "answer", "information", "think", "tool_call") for end in ("", "/"))
"""added tokens that are not special, as Qwen's are"""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "What is the capital of France? The capital of France is Paris.",
    "user assistant system tool question answer search information error result",
    "Überraschung, 東京は日本の首都です。 🙂 naïve café",
    '{"name": "search", "arguments": {"query": "the capital"}}',
)


@pytest.fixture
async def double():
    """A scripted HTTP server that stands for SGLang's."""
    from sglang_double import Double

    server = await Double().start()
    yield server
    await server.stop()


@pytest.fixture(scope="session")
def rank_stock(tmp_path_factory):
    """Rank processes of trainers, for all tests."""
    from reused_ranks import RankStock

    stock = RankStock(tmp_path_factory.mktemp("ranks"))
    yield stock
    stock.close()


@pytest.fixture
def reused_ranks(rank_stock):
    """Trainers that this test starts take their ranks from a stock, which saves the imports."""
    with rank_stock.used():
        yield


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that holds a tokenizer and nothing else."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_CORPUS * 4, trainer)
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in TAGS])
    folder = tmp_path_factory.mktemp("tiny")
    backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture(scope="session")
def hermes(tokenizer: Tokenizer) -> Renderer:
    """Calls as JSON, observations in turns of their own."""
    return make_renderer(tokenizer, "hermes")


@pytest.fixture(scope="session")
def tags(tokenizer: Tokenizer) -> Renderer:
    """Search-R1's tags, observations inline."""
    return make_renderer(tokenizer, "search_r1")


@pytest.fixture
async def lookup_run(tmp_path, tokenizer_dir, tags):
    """A run folder as `agentrl rollout` leaves it, made with the scripted engine; and the file of its environment."""
    from lookup import Search
    from replays import record, script

    from agentrl import __version__
    from agentrl.config import build_config
    from agentrl.store.run_folder import RunFolder

    env = tmp_path / "lookup.py"
    shutil.copy(Path(__file__).parent / "lookup.py", env)
    (tokenizer_dir / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    settings = {
        "run": str(tmp_path / "run"),
        "hf_checkpoint": str(tokenizer_dir),
        "env": str(env),
        "rollout_max_response_len": 2048,
        "tensorboard": False,
    }
    folder = RunFolder.create(build_config(settings), __version__)
    for t in await record(Search, script, tags, tmp_path / "made"):
        folder.episodes.write(t, step=0, split="train")
    folder.close()
    return folder.path, env
