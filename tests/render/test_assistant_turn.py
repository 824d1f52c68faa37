"""The turns of a data set: after the header that the policy would have seen come the ids that the model's own template writes."""

import json
import random
import unicodedata

import pytest
from conversations import NOW, hugging_face, text
from template_models import MODELS, renderer, template_source
from transformers.utils import chat_template_utils

from agentrl.data.conversations import to_trajectory
from agentrl.data.message_form import normal_messages
from agentrl.errors import TemplateError
from agentrl.render.message_shape import shape_of
from agentrl.types import Provenance

MODES = [(m.name, options) for m in MODELS for options in (({m.reads: True}, {m.reads: False}) if m.reads else ({},))]
BY_NAME = {m.name: m for m in MODELS}
FAST, FULL = 12, 2000
NO_CALLS = {"gemma3"}
"""families whose template has no place for calls"""
NO_REASONING = {"chatml", "qwen3_coder", "llama3", "kimi_k2", "gemma3", "mistral"}
"""families whose template has no place for reasoning"""
NO_TEXT_WITH_CALL = {"gpt_oss", "llama3"}
"""families whose template has no place for content beside a call"""
ONE_CALL = {"deepseek"}
"""families whose template writes no header for the second call of a conversation"""
DROPS_THOUGHTS = {"deepseek", "deepseek_v31", "kimi_k2_thinking"}
"""families whose template leaves out the thought that the policy must write"""
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


def talk(name, options, seed):
    """A random conversation that ends with the assistant."""
    rng = random.Random(f"{name}-{options}-{seed}")
    messages = [{"role": "user", "content": text(rng) or "hello"}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "be brief"})
    thinks = name not in NO_REASONING and False not in options.values()
    for i in range(rng.randint(1, 4)):
        turn = {"role": "assistant", "content": (text(rng).strip() or "ok") + f" mark{i}"}
        calls = name not in NO_CALLS and rng.random() < 0.4 and not (i and name in ONE_CALL)
        if calls:
            turn["tool_calls"] = [
                {
                    "id": f"abcdefgh{i}",
                    "function": {"name": "search", "arguments": {"query": f"{text(rng).strip()} q{i}"}},
                }
            ]
            if name in NO_TEXT_WITH_CALL:
                turn["content"] = None
        if thinks and rng.random() < 0.5:
            turn["reasoning_content"] = f"thought {i}"
        messages.append(turn)
        if calls:
            messages.append({"role": "tool", "tool_call_id": f"abcdefgh{i}", "content": text(rng) or "none"})
            turn = {"role": "assistant", "content": f"done{i}"}
            messages.append(turn)
        messages.append({"role": "user", "content": text(rng) or "and?"})
    return list(normal_messages(messages[:-1]))


def with_text_arguments(name, messages):
    """DeepSeek's template joins the arguments as text."""
    if name != "deepseek":
        return messages
    return [
        {**m, "tool_calls": [
            {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
            for c in m["tool_calls"]
        ]} if "tool_calls" in m else m
        for m in messages
    ]  # fmt: skip


def theirs(model, ours, messages, *, generate):
    if not model.name.startswith("deepseek"):
        return hugging_face(model, ours, messages, generate=generate)
    compiled = chat_template_utils._compile_jinja_template(template_source(model))
    variables = {**ours._template._variables, **ours.tokenizer.special}
    return compiled.render(
        messages=with_text_arguments(model.name, messages), add_generation_prompt=generate, tools=None, **variables
    )


def equals_the_template(name, options, seed):
    model, ours = BY_NAME[name], renderer(name, now=NOW, **options)
    messages = ours.with_call_ids(talk(name, options, seed))
    for at, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        where = (name, options, seed, at)
        written = ours.write_turn(turn, history=messages[:at])
        said = ours.tokenizer.decode(written.ids)
        header = theirs(model, ours, messages[:at], generate=True)
        whole = theirs(model, ours, messages[: at + 1], generate=False)
        assert not written.reasoning_left_out, where
        assert written.ids[-1] in ours.ends.values(), where
        if name in DROPS_THOUGHTS and (header.rstrip().endswith("<think>") or turn.get("reasoning_content")):
            thought, _, answer = said.rpartition("</think>")
            ended = whole.rstrip().rpartition("</think>" if "</think>" in whole else header.partition("<think>")[0])[2]
            assert turn.get("reasoning_content", "") in thought, where
            assert whole.startswith(header.partition("<think>")[0]), where
            assert answer.lstrip("\n") == normal(ended.lstrip("\n")), where
            continue
        if not whole.startswith(header):  # the last answer removes earlier thoughts
            shorter = [
                {k: v for k, v in m.items() if k not in ("reasoning_content", "thinking")} for m in messages[:at]
            ]
            header, whole = (theirs(model, ours, [*shorter, *more], generate=not more) for more in ((), (turn,)))
        assert whole.startswith(header), where
        expected = (
            whole[len(header) :].rstrip("\n") if name != "glm4" else whole[len(header) :] + said[said.rindex("<|") :]
        )
        assert list(written.ids) == ours.tokenizer.backend.encode(expected, add_special_tokens=False).ids, where


def normal(value):
    """As the tokenizer normalises texts."""
    return unicodedata.normalize("NFC", value)


@pytest.mark.parametrize(("name", "options"), MODES, ids=str)
def test_a_turn_is_what_the_template_writes_after_its_header(name, options):
    for seed in range(FAST):
        equals_the_template(name, options, seed)


@pytest.mark.full
@pytest.mark.parametrize(("name", "options"), MODES, ids=str)
def test_a_turn_is_what_the_template_writes_after_its_header_in_full(name, options):
    for seed in range(FAST, FULL):
        equals_the_template(name, options, seed)


@pytest.mark.parametrize(("name", "options"), MODES, ids=str)
def test_trained_turns_follow_the_header_that_the_policy_would_have_seen(name, options):
    model, ours = BY_NAME[name], renderer(name, now=NOW, **options)
    messages = [*QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure5b2e?"}]
    messages.append({"role": "assistant", "content": "yes"})
    trajectory = to_trajectory(0, messages, [], ours, 4096)
    ids = [(i, span.provenance) for s in trajectory.segments for span in s.spans for i in span.ids]
    last = max(n for n, (_, p) in enumerate(ids) if p is not Provenance.DEMONSTRATION) + 1
    context = ours.tokenizer.decode([i for i, _ in ids[:last]])
    header = theirs(model, ours, messages[:-1], generate=True)
    assert context.rpartition("Sure5b2e?")[2] == header.rpartition("Sure5b2e?")[2]
    assert len(trajectory.turns) == 2


@pytest.mark.parametrize(("name", "options"), MODES, ids=str)
def test_spelt_control_tokens_are_text(name, options):
    ours = renderer(name, now=NOW, **options)
    spelt = " ".join(t for t in ours.ends) + " <|im_start|>user <|eot_id|> </s>"
    plain = ours.write_turn({"role": "assistant", "content": "here Mark7c it ends"}, history=QUESTION).ids
    ids = ours.write_turn({"role": "assistant", "content": f"here {spelt} it ends"}, history=QUESTION).ids
    added = set(ours.tokenizer.added.values())
    assert [i for i in ids if i in added] == [i for i in plain if i in added]
    assert spelt in ours.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("name", "options", "message", "said"),
    [
        ("qwen3", {"enable_thinking": False}, {"content": "4"}, "4<|im_end|>"),
        ("qwen3", {}, {"content": "4", "reasoning_content": "so"}, "<think>\nso\n</think>\n\n4<|im_end|>"),
        ("qwen3_5", {}, {"content": "4"}, "\n</think>\n\n4<|im_end|>"),
        ("qwen3_5", {}, {"content": "<think>\nso\n</think>\n\n4"}, "so\n</think>\n\n4<|im_end|>"),
        ("deepseek", {}, {"content": "4"}, "\n</think>\n\n4<｜end▁of▁sentence｜>"),
        ("deepseek_v31", {"enable_thinking": True}, {"content": "4", "reasoning_content": "so"}, "so</think>4<｜end▁of▁sentence｜>"),
        ("kimi_k2_thinking", {}, {"content": "4", "reasoning_content": "so"}, "<think>so</think>4<|im_end|>"),
    ],
)  # fmt: skip
def test_the_turn_begins_where_the_header_ends(name, options, message, said):
    ours = renderer(name, **options)
    written = ours.write_turn({"role": "assistant", **message}, history=QUESTION)
    assert ours.tokenizer.decode(written.ids) == said


def test_reasoning_that_the_header_has_closed_is_reported():
    ours = renderer("qwen3", enable_thinking=False)
    written = ours.write_turn({"role": "assistant", "content": "4", "reasoning_content": "so"}, history=QUESTION)
    assert ours.tokenizer.decode(written.ids) == "4<|im_end|>"
    assert written.reasoning_left_out
    with pytest.raises(TemplateError, match="leaves its reasoning out"):
        ours.write_turn({"role": "assistant", "content": "", "reasoning_content": "so"}, history=QUESTION)


@pytest.mark.parametrize("name", sorted(NO_REASONING))
def test_reasoning_that_the_template_leaves_out_is_refused(name):
    with pytest.raises(TemplateError, match="leaves its reasoning out"):
        renderer(name).write_turn({"role": "assistant", "content": "", "reasoning_content": "so"}, history=QUESTION)


def test_what_a_template_writes_without_a_header_is_refused():
    call = {"type": "function", "id": "a", "function": {"name": "search", "arguments": {"query": "x"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    history = [*QUESTION, calling, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "4"}, *QUESTION]
    with pytest.raises(TemplateError, match="does not begin with the header"):
        renderer("deepseek").write_turn(calling, history=history)


def test_content_that_the_template_drops_beside_a_call_is_refused():
    call = {"type": "function", "id": "a", "function": {"name": "search", "arguments": {"query": "x"}}}
    with pytest.raises(TemplateError, match="leaves its content out"):
        renderer("llama3").write_turn({"role": "assistant", "content": "Look:", "tool_calls": [call]}, history=QUESTION)


@pytest.mark.parametrize("name", sorted(NO_CALLS))
def test_calls_that_the_template_leaves_out_are_refused(name):
    call = {"type": "function", "id": "a", "function": {"name": "search", "arguments": {"query": "x"}}}
    with pytest.raises(TemplateError, match="leaves its call of 'search' out"):
        renderer(name).write_turn({"role": "assistant", "content": "", "tool_calls": [call]}, history=QUESTION)


@pytest.mark.parametrize("name", [m.name for m in MODELS])
@pytest.mark.parametrize("key", ["type", "role"])
def test_text_under_keys_like_those_of_messages_is_text(name, key):
    ours = renderer(name)
    for depth in ({key: "<|im_end|>X"}, {"a": [{key: "X", "type": "image", "text": "X"}]}):
        arguments = eval(repr(depth).replace("X", next(iter(ours.ends))))
        call = {"type": "function", "id": "functions.f:0", "function": {"name": "f", "arguments": arguments}}
        plain = {
            **call,
            "function": {"name": "f", "arguments": eval(repr(depth).replace("X", "x").replace("<|im_end|>", ""))},
        }
        counts = []
        for c in (call, plain):
            messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [c]},
                        {"role": "tool", "name": "f", "tool_call_id": "functions.f:0", "content": "r"}]  # fmt: skip
            ids = [i for _, piece in ours.prompt(messages) for i in piece]
            counts.append([i for i in ids if i in set(ours.tokenizer.added.values())])
        assert counts[0] == counts[1]


@pytest.mark.parametrize("key", ["type", "role"])
def test_text_under_keys_like_those_of_messages_is_no_part_of_the_shape(key):
    """Otherwise it would be taken for text of the template, and each value would be another shape."""

    def shape(value):
        call = {"type": "function", "function": {"name": "f", "arguments": {key: value, "a": [{key: value}]}}}
        return shape_of([{"role": "assistant", "content": "", "tool_calls": [call]}])

    (one, texts, _), (other, _, _) = shape("<|im_end|>"), shape("x")
    assert one == other
    assert texts.count("<|im_end|>") == 2


@pytest.mark.parametrize("name", [m.name for m in MODELS if m.name not in NO_CALLS])
def test_arguments_as_text_and_as_an_object_are_one(name):
    ours = renderer(name)

    def prompt(arguments):
        call = {"type": "function", "id": "functions.f:0", "function": {"name": "f", "arguments": arguments}}
        result = {"role": "tool", "name": "f", "tool_call_id": "functions.f:0", "content": "r"}
        return ours.prompt([*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, result])

    assert prompt({"city": "Oslo"}) == prompt('{"city": "Oslo"}')
    assert "Oslo" in ours.tokenizer.decode(prompt({"city": "Oslo"})[0][1])
    assert '\\"Oslo' not in ours.tokenizer.decode(prompt({"city": "Oslo"})[0][1])
