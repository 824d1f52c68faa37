"""Random conversations as supervised data, beside what transformers' rendering of the model's template writes in each assistant's turn.

What a template can express is found by rendering with transformers, so a refusal of ours is judged by an independent witness.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jinja2
from conversations import NOW, TOOLS, text
from transformers.utils import chat_template_utils

from agentrl.data.conversations import to_trajectory
from agentrl.data.message_form import normal_messages
from agentrl.errors import TemplateError
from agentrl.render import Renderer
from agentrl.types import Message, Provenance

MAX_TOKENS = 1 << 20
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)
_QUOTED = re.compile(r"\(['\"].*['\"]\)|\(.*\)(?=: )", re.DOTALL)
"""what differs between refusals of one kind"""
_USER: Message = {"role": "user", "content": "What is 2 + 2?"}
_OPEN, _CLOSE = "<think>", "</think>"
_NO_HEADER = "(no such header)"


def modes(source: str) -> tuple[dict[str, bool], ...]:
    """Thinking on and off, for a template that reads it."""
    return ({"enable_thinking": True}, {"enable_thinking": False}) if "enable_thinking" in source else ({},)


@dataclass
class Subject:
    """A model's template as ours and as transformers render it."""

    name: str
    ours: Renderer
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def _compiled(self) -> Any:
        return chat_template_utils._compile_jinja_template(self.ours.tokenizer.chat_template)

    def theirs(self, messages: Sequence[Message], *, generate: bool, tools: Sequence[Any] = ()) -> str:
        """The conversation as transformers renders it, with the arguments of calls as this template takes them."""
        adapted = self.ours._family.adapt([self._with_arguments(m) for m in messages])
        variables = {**self.options, **self.ours.tokenizer.special, "strftime_now": NOW.strftime}
        return self._compiled.render(
            messages=adapted, tools=list(tools) or None, add_generation_prompt=generate, **variables
        )

    def _with_arguments(self, message: Message) -> Message:
        if not message.get("tool_calls") or not self.takes_text:
            return message
        calls = [
            {
                **c,
                "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)},
            }
            for c in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    @cached_property
    def takes_text(self) -> bool:
        """Whether the arguments of calls must be JSON text."""
        shown = {}
        for name, arguments in (("object", {"x": "Mark"}), ("text", '{"x": "Mark"}')):
            call = {"type": "function", "id": "abcdefgh0", "function": {"name": "f", "arguments": arguments}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            variables = {**self.options, **self.ours.tokenizer.special, "strftime_now": NOW.strftime}
            try:
                whole = self._compiled.render(messages=self.ours._family.adapt([_USER, turn]), tools=None, **variables)
            except _REFUSALS:
                whole = ""
            shown[name] = "Mark" in whole and "'Mark'" not in whole and '\\"Mark' not in whole
        return shown["text"] and not shown["object"]

    # -- what the template can express ---------------------------------------------------------------------------------

    @cached_property
    def shows_calls(self) -> bool:
        return self._shows([], [call_message("f", {"x": "Mark5a"})], "Mark5a")

    @cached_property
    def calls_again(self) -> bool:
        """A second call in a conversation is written after the header."""
        first = [call_message("f", {"x": "a"}), result_message("f", "r"), {"role": "assistant", "content": "b"}, _USER]
        return self._shows(first, [call_message("f", {"x": "Mark5a"})], "Mark5a")

    @cached_property
    def shows_content_with_call(self) -> bool:
        """In the turn, and in the context after it."""
        turn = {**call_message("f", {"x": "a"}), "content": "Mark5a"}
        after = [turn, result_message("f", "r"), {"role": "assistant", "content": "b"}]
        return self._shows([], [turn], "Mark5a") and self._shows([_USER, *after[:2]], after[2:], "Mark5a")

    @cached_property
    def needs_reasoning(self) -> bool:
        """The header opens a thought that only a turn with reasoning continues."""
        return not self._shows([], [{"role": "assistant", "content": "Mark5a"}], "Mark5a", follows=True)

    @cached_property
    def shows_reasoning(self) -> bool:
        """Reasoning is part of a last turn, or of what the header opens."""
        if self.header.rstrip().endswith(_CLOSE):
            return False
        thought = dict.fromkeys(("reasoning_content", "thinking"), "Mark5a")
        turn = {"role": "assistant", "content": "b", **thought}
        return self.header.rstrip().endswith(_OPEN) or self._shows([], [turn], "Mark5a")

    @cached_property
    def shows_system(self) -> bool:
        return self._shows([], [], "Mark5a", first=({"role": "system", "content": "Mark5a"},))

    @cached_property
    def header(self) -> str:
        return self.theirs([_USER], generate=True)

    @cached_property
    def needs_reasoning_after_result(self) -> bool:
        """The same after a tool's result."""
        history = [_USER, call_message("f", {"x": "a"}), result_message("f", "r")]
        return not self._shows(history, [{"role": "assistant", "content": "Mark5a"}], "Mark5a")

    def _shows(
        self,
        before: list[Message],
        after: list[Message],
        mark: str,
        first: Sequence[Message] = (),
        follows: bool = False,
    ) -> bool:
        """Whether the template shows the mark, and writes the last message after its header."""
        history = before if before[:1] == [_USER] else [*first, _USER, *before]
        try:
            shown = mark in self.theirs([*history, *after], generate=False)
            if not (before or follows):
                return shown
            return shown and not self.expected(history, after[-1], (), _CLOSE + "Mark5a").startswith(_NO_HEADER)
        except _REFUSALS:
            return False

    # -- conversations -------------------------------------------------------------------------------------------------

    def conversation(self, seed: int) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
        """A random conversation of what the template can express, and its tools."""
        rng = random.Random(f"{self.name}-{self.options}-{seed}")
        messages: list[Message] = [{"role": "user", "content": text(rng) or "hello"}]
        if self.shows_system and rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": "be brief"})
        called = False
        for i in range(rng.randint(1, 4)):
            turn: Message = {"role": "assistant", "content": f"{text(rng).strip() or 'ok'} mark{i}"}
            calls = self.shows_calls and rng.random() < 0.4 and (not called or self.calls_again)
            if self.needs_reasoning or (self.shows_reasoning and rng.random() < 0.5):
                turn["reasoning_content"] = f"thought {i}"
            if calls:
                called = True
                turn |= {"tool_calls": call_message("search", {"query": f"{text(rng).strip()} q{i}"}, i)["tool_calls"]}
                turn["content"] = turn["content"] if self.shows_content_with_call and rng.random() < 0.5 else ""
                messages += [turn, result_message("search", text(rng) or "none", i)]
                turn = {"role": "assistant", "content": f"done{i}"}
                if self.needs_reasoning_after_result:
                    turn["reasoning_content"] = f"so {i}"
            messages += [turn, {"role": "user", "content": text(rng) or "and?"}]
        tools = TOOLS if self.shows_calls and rng.random() < 0.3 else ()
        return self.ours.with_call_ids(normal_messages(messages[:-1])), tools

    # -- the comparison ------------------------------------------------------------------------------------------------

    def differences(self, seed: int) -> Iterator[str]:
        """The turns of a conversation that are trained otherwise than the template writes them, in words.

        Raises:
            TemplateError: the conversation is refused.
        """
        messages, tools = self.conversation(seed)
        trajectory = to_trajectory(0, messages, tools, self.ours, MAX_TOKENS)
        trained = [s.ids for g in trajectory.segments for s in g.spans if s.provenance is Provenance.DEMONSTRATION]
        places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if len(places) != len(trained):
            yield f"{len(trained)} of {len(places)} turns trained"
            return
        for at, ids in zip(places, trained, strict=True):
            said = self.ours.tokenizer.decode(ids)
            try:
                expected = self.expected(messages[:at], messages[at], tools, said)
            except _REFUSALS as e:
                yield f"turn {at} is trained, and transformers refuses it: {e}"
                continue
            encoded = self.ours.tokenizer.backend.encode(expected, add_special_tokens=False).ids
            if list(ids) != encoded or ids[-1] not in self.ours.ends.values():
                yield f"turn {at}: trained {said!r}, the template writes {expected!r}"

    def expressible(self, seed: int) -> bool:
        """Whether transformers writes every assistant's turn of a conversation after its header."""
        messages, tools = self.conversation(seed)
        try:
            return not any(
                self.expected(messages[:at], turn, tools, "").startswith(_NO_HEADER)
                for at, turn in enumerate(messages)
                if turn["role"] == "assistant"
            )
        except _REFUSALS:
            return False

    def expected(self, history: list[Message], turn: Message, tools: Sequence[Any], said: str) -> str:
        """What the template writes in the turn after its header. `said` gives the token with which the next header ends a turn."""
        header = self.theirs(history, generate=True, tools=tools)
        whole = self.theirs([*history, turn], generate=False, tools=tools)
        if not whole.startswith(header) and any(m.get("reasoning_content") for m in history):
            plain = [{k: v for k, v in m.items() if k not in ("reasoning_content", "thinking")} for m in history]
            shorter = self.theirs(plain, generate=True, tools=tools)
            if shorter[-16:] == header[-16:]:
                header, whole = shorter, self.theirs([*plain, turn], generate=False, tools=tools)
        if whole.startswith(header):
            return self._to_end(whole[len(header) :], said)
        opened = header[header.rfind(_OPEN) :] if _OPEN in header else ""
        if opened and not opened.removeprefix(_OPEN).strip() and whole.startswith(header[: header.rfind(_OPEN)]):
            return self._after_open_thought(whole[header.rfind(_OPEN) :], opened, turn, said)
        return f"{_NO_HEADER} {whole[-200:]}"

    def _after_open_thought(self, rest: str, opened: str, turn: Message, said: str) -> str:
        """The header opens a thought that the template does not write: the thought, its closing tag, and the answer as written."""
        rest = self._to_end(rest, said)
        if rest.startswith(_OPEN):
            return rest.removeprefix(_OPEN).removeprefix(opened.removeprefix(_OPEN))
        answer = rest.partition(_CLOSE)[2] if rest.startswith(_CLOSE) else rest
        thought, _, ours = said.partition(_CLOSE)
        wanted = turn.get("reasoning_content", "")
        same = ours.lstrip("\n") == normal_form(answer.lstrip("\n")) and thought.strip("\n") == wanted
        return said if same else f"{wanted}{_CLOSE}{answer}"

    def _to_end(self, written: str, said: str) -> str:
        """The turn up to its last end token; a family without one ends it with the next header."""
        ends = [written.rfind(e) + len(e) for e in self.ours.ends if e in written]
        if ends and not self.ours.tokenizer.pattern.sub("", written[max(ends) :]).strip():
            return written[: max(ends)]
        return written + next((e for e in self.ours.ends if said.endswith(e)), "")


@dataclass
class Outcome:
    """What became of the conversations of a template."""

    conversations: int = 0
    equal: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """reasons"""
    refused_wrongly: list[str] = field(default_factory=list)
    """conversations in which transformers writes every turn after its header"""
    different: list[str] = field(default_factory=list)


def compare(subject: Subject, seeds: Sequence[int]) -> Outcome:
    """Compare the conversations of these seeds."""
    outcome = Outcome()
    for seed in seeds:
        outcome.conversations += 1
        try:
            found = list(subject.differences(seed))
        except TemplateError as e:
            outcome.refused[_QUOTED.sub("…", str(e))] += 1
            if subject.expressible(seed):
                outcome.refused_wrongly.append(f"seed {seed}: {e}")
            continue
        outcome.equal += not found
        outcome.different += [f"seed {seed}, {line}" for line in found]
    return outcome


def call_message(name: str, arguments: dict[str, Any], number: int = 0) -> Message:
    call = {"type": "function", "id": f"abcdefgh{number}", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result_message(name: str, content: str, number: int = 0) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"abcdefgh{number}", "content": content}


def normal_form(value: str) -> str:
    """As the tokenizer normalises texts."""
    import unicodedata

    return unicodedata.normalize("NFC", value)
