"""Agreement with SGLang's own parsers on well-formed output (values as text, since those of some formats carry no types).

SGLang lives in an environment of its own (`make setup-sglang-cpu`, or AGENTRL_SGLANG_PYTHON); its interpreter reads all texts at once.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sglang_detectors import DETECTORS
from utterances import WRITERS, format_of

from agentrl.engine.sglang.installation import find_installation
from agentrl.errors import ConfigError
from agentrl.render import FORMATS
from agentrl.types import FinishReason

pytestmark = pytest.mark.sglang
_words = st.text("abcdefghij ÄÖ東京🙂.,!?'0123", min_size=1, max_size=20).map(lambda t: f"w{t.strip()}w")
_arguments = st.dictionaries(st.sampled_from(("query", "place")), _words, min_size=1)
_calls = st.lists(st.tuples(st.sampled_from(("search", "look_up")), _arguments), min_size=1, max_size=3)


def said(name):
    """A hundred utterances of a format: what they call, and their text."""
    made = []

    @settings(max_examples=100, database=None, derandomize=True, phases=[Phase.generate])
    @given(_calls)
    def collect(calls):
        text = WRITERS[name](calls)
        if name == "gpt_oss":
            text = f"<|start|>assistant{text}<|call|>"
        made.append((calls, text.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")))

    collect()
    return made


@pytest.fixture(scope="module")
def theirs():
    """Every format's utterances as SGLang reads them."""
    try:
        installation = find_installation(os.environ.get("AGENTRL_SGLANG_PYTHON"))
    except ConfigError as e:  # tests may have a server, but no SGLang of their own
        pytest.skip(str(e))
    asked = {name: [text for _, text in said(name)] for name in DETECTORS}
    script = Path(__file__).with_name("sglang_detectors.py")
    done = subprocess.run(
        [installation.python, script],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=installation.environment,
        cwd=script.parent,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", DETECTORS)
def test_the_same_calls(name, theirs):
    utterances = said(name)
    assert len(utterances) == len(theirs[name]) >= 100
    for (calls, text), found in zip(utterances, theirs[name], strict=True):
        ours = [(c.name, c.arguments) for c in FORMATS[format_of(name)].parse(text, FinishReason.STOP, 8).calls]
        assert ours == [tuple(c) for c in found] == calls, text
