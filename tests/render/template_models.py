"""Test models: each family's template with a real vocabulary under it.

Templates: from the `trl` package's data files; those that it lacks are written for these tests (templates/). Vocabulary: the first ranks
of Qwen's (from the `dashscope` package's data file; all of it where speed or exactness on the real one is the point), with the family's
special tokens. Both packages are needed for tests only.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from utterances import WRITERS, Calls

from agentrl.render import Renderer, Tokenizer, make_renderer

__all__ = ["BY_NAME", "MODELS", "Model", "renderer", "template_source", "tokenizer", "vocabulary"]

HERE = Path(__file__).parent
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
_QWEN_TAGS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
_THINK = "<think> </think>"
_GLM = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> /nothink"
_GLM_TAGS = (
    f"{_THINK} <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>"
)
_LLAMA = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>"
_KIMI = "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>"
_KIMI_TAGS = (
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> "
    "<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"
)
_HARMONY = "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>"
_GEMMA = "<pad> <eos> <bos> <start_of_turn> <end_of_turn> <start_of_image>"
_MISTRAL = (
    "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [ARGS] [CALL_ID]"
)


@dataclass(frozen=True)
class Model:
    """One family under test."""

    name: str
    template: str
    """file of `trl`, or of templates/ here if it begins with './'"""
    special: str
    """special tokens, by spaces"""
    plain: str = ""
    """added tokens that are not special"""
    bos: str = ""
    eos: str = ""
    end: str = ""
    """how the policy ends a turn"""
    call_end: str = ""
    """how it ends a turn that calls a tool, where that differs"""
    call: Callable[[str, str], str] = lambda name, query: ""
    """the policy's text for a call with one argument, query"""
    calls: Callable[[Calls], str] | None = None
    """the policy's text for several calls; None: one in a turn"""
    think: Callable[[str], str] | None = None
    """the policy's text for a thought, with which a turn begins; None: it does not think"""
    answer: Callable[[str], str] = str
    """the policy's text for an answer, after its thought"""
    reads: str = ""
    """the template's argument that turns thinking on and off, if there is one"""
    roles: frozenset[str] = frozenset({"system", "user", "assistant", "tool"})
    """what the template takes in the middle of a conversation"""
    args: tuple[tuple[str, Any], ...] = ()
    family: str = ""
    say: Callable[[str], str] = str
    """the policy's text for an answer"""


def _json(name: str, query: str) -> str:
    return json.dumps({"name": name, "arguments": {"query": query}}, ensure_ascii=False)


def _js(query: str) -> str:
    return json.dumps({"query": query}, ensure_ascii=False)


def _hermes(name: str, query: str) -> str:
    return f"<tool_call>\n{_json(name, query)}\n</tool_call>"


def _xml(name: str, query: str) -> str:
    return f"<tool_call>\n<function={name}>\n<parameter=query>\n{query}\n</parameter>\n</function>\n</tool_call>"


def _glm(name: str, query: str) -> str:
    return (
        f"\n<think></think>\n<tool_call>{name}\n<arg_key>query</arg_key>\n<arg_value>{query}</arg_value>\n</tool_call>"
    )


def _v3(name: str, query: str) -> str:
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_js(query)}\n```<｜tool▁call▁end｜>"
    return f"</think><｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def _v31(name: str, query: str) -> str:
    return WRITERS["deepseek_v31"]([(name, {"query": query})])


def _kimi(name: str, query: str) -> str:
    call = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_js(query)}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def _mistral(name: str, query: str) -> str:
    return f'[TOOL_CALLS][{_json(name, query)[:-1]}, "id": "abcdefgh0"}}]'


def _llama(name: str, query: str) -> str:
    return _json(name, query).replace('"arguments"', '"parameters"', 1)


def _harmony(name: str, query: str) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{header}{_js(query)}"


def _final(text: str) -> str:
    return f"<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>{text}"


def _pythonic(name: str, query: str) -> str:
    return f"[{name}(query={query!r})]"


_ALL = frozenset({"system", "user", "assistant", "tool"})
_NO_SYSTEM = _ALL - {"system"}
_IM_END = {"eos": "<|im_end|>", "end": "<|im_end|>"}
_DS = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "end": "<｜end▁of▁sentence｜>",
    "roles": _NO_SYSTEM,
}
MODELS: tuple[Model, ...] = (
    Model("chatml", "qwen2_5", _QWEN, _QWEN_TAGS, call=_hermes, calls=WRITERS["hermes"], think=lambda t: f"<think>{t}</think>", **_IM_END),
    Model("qwen3", "qwen3", _QWEN, _QWEN_TAGS, call=_hermes, calls=WRITERS["hermes"], think=lambda t: f"<think>\n{t}\n</think>\n\n",
          say=lambda t: f"<think>\nso\n</think>\n\n{t}", reads="enable_thinking", **_IM_END),
    Model("qwen3_coder", "./qwen3_coder", _QWEN, _QWEN_TAGS, call=_xml, calls=WRITERS["qwen3_coder"], **_IM_END),
    Model(
        "qwen3_5", "qwen3_5_think", _QWEN, _QWEN_TAGS, family="qwen3_coder", roles=_NO_SYSTEM, calls=WRITERS["qwen3_coder"],
        call=lambda n, q: f"so\n</think>\n\n{_xml(n, q)}", say=lambda t: f"so\n</think>\n\n{t}", think=lambda t: f"{t}\n</think>\n\n",
        reads="enable_thinking", **_IM_END,
    ),
    Model("llama3", "llama3_2", _LLAMA, bos="<|begin_of_text|>", eos="<|eot_id|>", end="<|eot_id|>", call_end="<|eom_id|>", call=_llama,
          calls=WRITERS["llama3"]),
    Model("glm4", "glm4moe", _GLM, _GLM_TAGS, eos="<|endoftext|>", end="<|user|>", call_end="<|observation|>", call=_glm,
          calls=WRITERS["glm4"], say=lambda t: f"\n<think>so</think>\n{t}", think=lambda t: f"\n<think>{t}</think>\n",
          reads="enable_thinking", roles=_NO_SYSTEM),
    Model("deepseek", "deepseekv3", _DEEPSEEK, _THINK, call=_v3, calls=WRITERS["deepseek_v3"], say=lambda t: f"so</think>{t}",
          think=lambda t: f"{t}</think>", **_DS),
    Model("deepseek_v31", "./deepseek_v31", _DEEPSEEK, _THINK, call=_v31, calls=WRITERS["deepseek_v31"], think=lambda t: f"{t}</think>",
          reads="enable_thinking", family="deepseek", **_DS),
    Model("kimi_k2", "./kimi_k2", _KIMI, _KIMI_TAGS, bos="[BOS]", eos="[EOS]", end="<|im_end|>", call=_kimi, calls=WRITERS["kimi_k2"]),
    Model("kimi_k2_thinking", "./kimi_k2_thinking", _KIMI, f"{_KIMI_TAGS} {_THINK}", bos="[BOS]", eos="[EOS]", end="<|im_end|>",
          call=lambda n, q: f"<think>so</think>{_kimi(n, q)}", calls=WRITERS["kimi_k2"], say=lambda t: f"<think>so</think>{t}",
          think=lambda t: f"<think>{t}</think>"),
    Model("gpt_oss", "gptoss", _HARMONY, bos="<|startoftext|>", eos="<|return|>", end="<|return|>", call_end="<|call|>",
          call=_harmony, say=_final, roles=_NO_SYSTEM, answer=lambda t: f"<|channel|>final<|message|>{t}",
          think=lambda t: f"<|channel|>analysis<|message|>{t}<|end|><|start|>assistant"),
    Model("gemma3", "gemma3", _GEMMA, bos="<bos>", eos="<eos>", end="<end_of_turn>", call=_pythonic, calls=WRITERS["pythonic"],
          roles=_NO_SYSTEM),
    Model("mistral", "./mistral", _MISTRAL, bos="<s>", eos="</s>", end="</s>", call=_mistral, calls=WRITERS["mistral"], roles=_NO_SYSTEM),
)  # fmt: skip
"""The families of features B3, some with two templates."""
BY_NAME = {m.name: m for m in MODELS}


def data_file(package: str, *parts: str) -> Path:
    """A file of a test-only package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the test-only package {package}")
    return Path(spec.origin).parent.joinpath(*parts)


def template_source(model: Model) -> str:
    """The family's chat template."""
    if model.template.startswith("./"):
        return (HERE / "templates" / f"{model.template[2:]}.jinja").read_text(encoding="utf-8")
    return data_file("trl", "chat_templates", f"{model.template}.jinja").read_text(encoding="utf-8")


@cache
def vocabulary(size: int | None) -> tokenizers.Tokenizer:
    """Byte-level BPE of the first `size` ranks of Qwen's vocabulary (None: all), without added tokens."""
    ranks: dict[bytes, int] = {}
    for line in data_file("dashscope", "resources", "qwen.tiktoken").read_bytes().splitlines():
        if line.strip():
            token, rank = line.split()
            if size is None or int(rank) < size:
                ranks[base64.b64decode(token)] = int(rank)
    letters = _letters()
    text = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = [(rank, ranks[t[:i]], ranks[t[i:]], text[t[:i]], text[t[i:]])
              for t, rank in ranks.items() for i in range(1, len(t)) if t[:i] in ranks and t[i:] in ranks]  # fmt: skip
    backend = tokenizers.Tokenizer(
        models.BPE({text[t]: r for t, r in ranks.items()}, [(a, b) for *_, a, b in sorted(merges)])
    )
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _letters() -> dict[int, str]:
    """GPT-2's way of writing bytes as letters."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


@cache
def tokenizer(name: str, size: int | None = 6000) -> Tokenizer:
    """A family's tokenizer."""
    model = BY_NAME[name]
    base = vocabulary(size)
    backend = tokenizers.Tokenizer(base.model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = base.normalizer, base.pre_tokenizer, base.decoder
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in model.special.split()])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in model.plain.split()])
    special = {k: v for k, v in (("bos_token", model.bos), ("eos_token", model.eos)) if v}
    return Tokenizer(backend, chat_template=template_source(model), special=special)


@cache
def renderer(name: str, size: int | None = 6000, **options: Any) -> Renderer:
    """A family's renderer, shared by the tests that request the same."""
    return make_renderer(tokenizer(name, size), **{**dict(BY_NAME[name].args), **options})
