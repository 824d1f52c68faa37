"""SGLang's own parsers of tool calls, run by its own interpreter: `python sglang_detectors.py`, never imported.

Reads JSON from standard input: {format: [text, …]}. Writes {format: [[[name, arguments], …], …]}, or for a format a sentence why not.
"""

import importlib
import json
import sys

DETECTORS = {
    "hermes": "qwen25_detector.Qwen25Detector",
    "qwen3_coder": "qwen3_coder_detector.Qwen3CoderDetector",
    "glm4": "glm4_moe_detector.Glm4MoeDetector",
    "deepseek_v3": "deepseekv3_detector.DeepSeekV3Detector",
    "glm47": "glm47_moe_detector.Glm47MoeDetector",
    "deepseek_v31": "deepseekv31_detector.DeepSeekV31Detector",
    "mistral_named": "mistral_detector.MistralDetector",
    "kimi_k2": "kimik2_detector.KimiK2Detector",
    "mistral": "mistral_detector.MistralDetector",
    "llama3": "llama32_detector.Llama32Detector",
    "gpt_oss": "gpt_oss_detector.GptOssDetector",
    "pythonic": "pythonic_detector.PythonicDetector",
}


def tools():
    tool = importlib.import_module("sglang.srt.entrypoints.openai.protocol").Tool
    schema = {"type": "object", "properties": {k: {"type": "string"} for k in ("query", "place")}}
    return [
        tool.model_validate({"type": "function", "function": {"name": n, "parameters": schema}})
        for n in ("search", "look_up")
    ]


def read(name, texts, known):
    module, _, cls = DETECTORS[name].partition(".")
    make = getattr(importlib.import_module(f"sglang.srt.function_call.{module}"), cls)
    return [[[c.name, json.loads(c.parameters)] for c in make().detect_and_parse(text, known).calls] for text in texts]


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    known = tools()
    answer = {name: read(name, texts, known) for name, texts in asked.items()}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")  # a separate line, after whatever SGLang printed on import
