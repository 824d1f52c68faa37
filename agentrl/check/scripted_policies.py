"""The policies of a check, as scripts for `ScriptedEngine`, with a tokenizer and a renderer built in code: no model and no files.

Episodes with an even index follow the script: each tool once with valid arguments, then several calls in one turn (where the action format
can write them), then the task's label as the answer. Episodes with an odd index act randomly: valid and invalid calls, several calls in one
turn, unknown tools, markup that cannot be parsed, empty text, long and unusual text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from agentrl.engine.scripted import ScriptedEngine, ScriptedRequest
from agentrl.render import FORMATS, ActionFormat, Renderer, TagFormat, Tokenizer, make_renderer
from agentrl.tool import ToolSpec
from agentrl.types import EpisodeSpec, Task, split_role_id

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] if m['content'] is string else m['content'] | tojson }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ToolsOfTask = Callable[[Task], Sequence[ToolSpec]]
"""the tools that the policy sees in the episodes of a task"""
_MAX_CALLS = 8
_LABEL_SHARE = 0.25
"""share of numbers that are the task's label, where that is one"""
"""calls in one turn"""
_UNUSUAL = (
    "🙂 naïve 東京",
    "<tool_call>",
    "</answer>",
    '{"name": ',
    "\x00\x07",
    "a" * 3000,
    "<|im_start|>system",
    "null",
    "-1",
)


def make_tiny_renderer(action_format: str | ActionFormat | None) -> Renderer:
    """Return a renderer with bytes as tokens and the ChatML template. Formats of model families are replaced by hermes: an Env sees no difference."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = Tokenizer(backend, chat_template=_TEMPLATE, special={"eos_token": "<|im_end|>"})
    form = FORMATS.get(action_format) if isinstance(action_format, str) else action_format
    return make_renderer(tokenizer, form if isinstance(form, TagFormat) else "hermes", where="agentrl check")


class Policy:
    """The script of the engine: one of the two policies, by the episode's index."""

    def __init__(self, renderer: Renderer, tools: ToolsOfTask, specs: Mapping[str, EpisodeSpec]) -> None:
        self._renderer = renderer
        self._tools_of = tools
        self._specs = specs

    def engine(self) -> ScriptedEngine:
        tokenizer = self._renderer.tokenizer
        return ScriptedEngine(
            self, encode=tokenizer.encode_plain, decode=tokenizer.decode, end_id=self._renderer.stop_token_ids[0]
        )

    def __call__(self, request: ScriptedRequest) -> str:
        spec, random = self._specs[split_role_id(request.session)[0]], Random(request.sampling.seed)
        if spec.index % 2:
            return self._random(spec, request.number, random)
        return self._scripted(spec.task, request.number, random)

    def _several_calls(self, tools: Sequence[ToolSpec]) -> bool:
        """True if there are tools and the action format can write several calls in one turn."""
        return bool(tools) and not isinstance(self._renderer.format, TagFormat)

    def _calls(self, task: Task, random: Random) -> str:
        """Each tool once or more, at least three calls."""
        tools = self._tools_of(task)
        count = min(_MAX_CALLS, max(3, len(tools)))
        return "".join(self._call(tools[i % len(tools)], task, random) for i in range(count))

    def _scripted(self, task: Task, turn: int, random: Random) -> str:
        tools = self._tools_of(task)
        if turn < len(tools):
            return self._call(tools[turn], task, random)
        if turn == len(tools) and self._several_calls(tools):
            return self._calls(task, random)
        return self._answer(label_text(task.label))

    def _random(self, spec: EpisodeSpec, turn: int, random: Random) -> str:
        """Return a random action. Each kind opens some episode, so that a few episodes cover all kinds."""
        tools = self._tools_of(spec.task)
        tool = random.choice(tools) if tools else None
        kinds = ["broken", "empty", "unknown", "unusual", "answer", "text", *(["wrong", "call"] if tool else [])]
        if self._several_calls(tools):
            kinds.append("calls")
        kind = kinds[spec.index // 2 % len(kinds)] if turn == 0 else random.choice(kinds)
        if tool is not None and kind == "call":
            return self._call(tool, spec.task, random)
        if kind == "calls":
            return self._calls(spec.task, random)
        if tool is not None and kind == "wrong":
            return self._write(tool.name, {"wrong": random.choice(_UNUSUAL)})
        texts = {
            "broken": "<search> </search>"
            if isinstance(self._renderer.format, TagFormat)
            else "<tool_call>{</tool_call>",
            "empty": "",
            "unknown": self._write("no_such_tool", {"x": 1}),
            "unusual": random.choice(_UNUSUAL),
            "answer": self._answer(random.choice((label_text(spec.task.label), "no idea", "", *_UNUSUAL))),
        }
        return texts.get(kind, " ".join(random.choices(words(spec.task), k=random.randint(1, 12))))

    def _call(self, spec: ToolSpec, task: Task, random: Random) -> str:
        required = spec.parameters.get("required", [])
        definitions = spec.parameters.get("$defs", {})
        properties = {
            n: s for n, s in spec.parameters.get("properties", {}).items() if n in required or random.random() < 0.5
        }
        return self._write(spec.name, {n: argument(s, definitions, task, random) for n, s in properties.items()})

    def _write(self, name: str, arguments: Mapping[str, Any]) -> str:
        form = self._renderer.format
        if not isinstance(form, TagFormat):
            return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        tag = next((t for t, (tool, _) in form.calls.items() if tool == name), next(iter(form.calls)))
        return f"<{tag}>{next(iter(arguments.values()), '')}</{tag}>"

    def _answer(self, text: str) -> str:
        tag = self._renderer.format.answer_tag if isinstance(self._renderer.format, TagFormat) else "answer"
        return f"<{tag}>{text}</{tag}>"


def argument(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], task: Task, random: Random, depth: int = 0
) -> Any:
    """Return a random value of the type that a JSON schema describes. Patterns and formats are ignored."""
    if "$ref" in schema:
        schema = definitions.get(str(schema["$ref"]).rpartition("/")[2], {})
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return random.choice(schema["enum"])
    choices = schema.get("anyOf") or schema.get("allOf")
    if choices:
        return argument(random.choice(choices), definitions, task, random, depth + 1)
    kind = schema.get("type", "string")
    if kind == "string":
        return " ".join(random.choices(words(task), k=random.randint(1, 4)))
    if kind in ("integer", "number"):
        if isinstance(task.label, int) and random.random() < _LABEL_SHARE:
            return task.label
        low = schema.get("minimum", 0)
        return random.randint(int(low), int(schema.get("maximum", max(low, 0) + 5)))
    if kind == "array":
        length = max(int(schema.get("minItems", 1)), 1) if depth < 4 else 0
        return [argument(schema.get("items", {}), definitions, task, random, depth + 1) for _ in range(length)]
    if kind == "object":
        known = schema.get("properties", {}) if depth < 4 else {}
        return {n: argument(s, definitions, task, random, depth + 1) for n, s in known.items()}
    return random.random() < 0.5 if kind == "boolean" else None


def words(task: Task) -> list[str]:
    """Return words of the task, for arguments and random text."""
    text = " ".join(str(m.get("content") or "") for m in task.messages)
    return text.split()[:200] or ["word"]


def label_text(label: Any) -> str:
    """Return a label as an answer; the first one if there are several."""
    while isinstance(label, (list, tuple)) and label:
        label = label[0]
    return label if isinstance(label, str) else json.dumps(label, default=str)
