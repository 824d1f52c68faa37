"""Agreement with SGLang's own parsers on well-formed output (values as text, since those of some formats carry no types)."""

import importlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from utterances import WRITERS

from agentrl.render import FORMATS
from agentrl.types import FinishReason

DETECTORS = {
    "hermes": "qwen25_detector.Qwen25Detector",
    "qwen3_coder": "qwen3_coder_detector.Qwen3CoderDetector",
    "glm4": "glm4_moe_detector.Glm4MoeDetector",
    "deepseek_v3": "deepseekv3_detector.DeepSeekV3Detector",
    "kimi_k2": "kimik2_detector.KimiK2Detector",
    "mistral": "mistral_detector.MistralDetector",
    "llama3": "llama32_detector.Llama32Detector",
    "gpt_oss": "gpt_oss_detector.GptOssDetector",
    "pythonic": "pythonic_detector.PythonicDetector",
}
pytest.importorskip(
    "sglang.srt.function_call.base_format_detector", reason="needs the package sglang", exc_type=ImportError
)
_words = st.text("abcdefghij ÄÖ東京🙂.,!?'0123", min_size=1, max_size=20).map(lambda t: f"w{t.strip()}w")
_arguments = st.dictionaries(st.sampled_from(("query", "place")), _words, min_size=1)
_calls = st.lists(st.tuples(st.sampled_from(("search", "look_up")), _arguments), min_size=1, max_size=3)


def detector(name):
    module, _, cls = DETECTORS[name].partition(".")
    return getattr(importlib.import_module(f"sglang.srt.function_call.{module}"), cls)()


def tools():
    tool = importlib.import_module("sglang.srt.entrypoints.openai.protocol").Tool
    schema = {"type": "object", "properties": {k: {"type": "string"} for k in ("query", "place")}}
    return [
        tool.model_validate({"type": "function", "function": {"name": n, "parameters": schema}})
        for n in ("search", "look_up")
    ]


@pytest.mark.parametrize("name", DETECTORS)
def test_the_same_calls(name):
    known = tools()

    @settings(max_examples=100)
    @given(_calls)
    def check(calls):
        text = WRITERS[name](calls)
        if name == "gpt_oss":
            text = f"<|start|>assistant{text}<|call|>"
        text = text.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
        ours = [(c.name, c.arguments) for c in FORMATS[name].parse(text, FinishReason.STOP, 8).calls]
        theirs = [(c.name, json.loads(c.parameters)) for c in detector(name).detect_and_parse(text, known).calls]
        assert ours == theirs == calls

    check()
