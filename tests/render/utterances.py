"""What a policy may say: well-formed calls in each format, in thought and prose, with what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

Calls = Sequence[tuple[str, dict[str, Any]]]


def json_text(value: Any) -> str:
    """JSON as policies write it."""
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{json_text({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def _xml(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"

    return "\n".join(one(n, a) for n, a in calls)


def _glm(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{pairs}</tool_call>"

    return "\n".join(one(n, a) for n, a in calls)


def _deepseek(calls: Calls) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json_text(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _glm47(calls: Calls) -> str:
    return _glm(calls).replace("\n<", "<")


def _v31(calls: Calls) -> str:
    inside = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json_text(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{json_text(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def _mistral(calls: Calls) -> str:
    return "[TOOL_CALLS]" + json_text(
        [{"name": n, "arguments": a, "id": f"abcdefgh{i}"} for i, (n, a) in enumerate(calls)]
    )


def _named(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json_text(a)}" for n, a in calls)


def _llama(calls: Calls) -> str:
    return "<|python_tag|>" + "; ".join(json_text({"name": n, "parameters": a}) for n, a in calls)


def _harmony(calls: Calls) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json_text(a)}" for n, a in calls
    )


def _pythonic(calls: Calls) -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"


def _tags(calls: Calls) -> str:
    return "\n".join(f"<search> {a['query']} </search>" for _, a in calls)


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": _hermes, "qwen3_coder": _xml, "glm4": _glm, "deepseek_v3": _deepseek, "kimi_k2": _kimi, "mistral": _mistral, "llama3": _llama,
    "gpt_oss": _harmony, "pythonic": _pythonic, "search_r1": _tags, "glm47": _glm47, "deepseek_v31": _v31, "mistral_named": _named,
}  # fmt: skip
_ALSO = {"glm47": "glm4", "deepseek_v31": "deepseek_v3", "mistral_named": "mistral"}
"""other ways of writing calls that a format reads"""
TEXT_ONLY = ("qwen3_coder", "glm4", "glm47")
"""formats whose values are text"""


def format_of(name: str) -> str:
    """The format that reads what a writer writes."""
    return _ALSO.get(name, name)


_letters = st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"), exclude_characters="<>[]`｜|")
_names = st.from_regex(r"[a-z][a-z0-9_]{0,4}", fullmatch=True)
_leaves = st.one_of(st.text(_letters, max_size=8), st.integers(-1000, 1000), st.booleans(), st.none())
_values = st.one_of(_leaves, st.lists(_leaves, max_size=2), st.dictionaries(_names, _leaves, max_size=2))
_plain = st.text(_letters, max_size=12).map(lambda t: f"v{t.strip()}v")


@st.composite
def utterances(draw: Any, name: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """(text, the calls in it)."""
    if name == "search_r1":
        calls = [("search", {"query": draw(_plain)}) for _ in range(draw(st.integers(1, 3)))]
    else:
        values = _plain if name in TEXT_ONLY else _values
        calls = draw(st.lists(st.tuples(_names, st.dictionaries(_names, values, max_size=2)), min_size=1, max_size=3))
    if name == "pythonic":
        import keyword

        calls = [(f"f_{n}", {f"k_{k}": v for k, v in a.items() if not keyword.iskeyword(k)}) for n, a in calls]
    text = WRITERS[name](calls)
    if name not in ("pythonic", "gpt_oss"):
        thought = draw(st.sampled_from(("", "<think>let me see</think>", f"<think>perhaps {text}?</think>\n")))
        text = thought + draw(st.sampled_from(("", "I will look.\n"))) + text
    elif name == "gpt_oss":
        text = draw(st.sampled_from(("", "<|channel|>analysis<|message|>let me see<|end|><|start|>assistant"))) + text
    return text, [(n, dict(a)) for n, a in calls]
