"""The texts of the mock engine and the tool, with the real Qwen vocabulary: built once, kept under build/overhead.

The vocabulary is `qwen.tiktoken` of the `dashscope` wheel and the chat template `qwen2_5.jinja` of the `trl` wheel. Only tests and benchmarks
need them (`make bench-overhead` puts them into build/overhead/packages). On a machine without internet, the vocabulary of the embedded policy
(2,042 entries) and a template like Qwen's replace them: the same numbers of tokens, with other ids.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from agentrl.render import Renderer, Tokenizer, make_renderer
from agentrl.types import Message

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "overhead"
MODEL = BUILD / "tokenizer"
"""its tokenizer and its config; there are no weights"""
CONTEXT = 131072
EMBEDDED = ROOT / "agentrl" / "assets" / "search_r1_3m" / "tokenizer.json"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' + messages[0]['content'] + '\\n\\n# Tools' }}
{%- for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m['role'] == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m['content'] + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first) %}{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') }}
{%- for c in m['tool_calls'] or [] %}{{ '\\n<tool_call>\\n' + (c['function'] | tojson) + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""for the embedded policy's vocabulary"""
TURN_TOKENS = 64
DOCUMENT_TOKENS = 100
SYSTEM = "You are a careful research assistant. Use the search tool until you know the answer, then reply with <answer>...</answer>."
ANSWER = "forty two"
_FILL = (
    "The question asks about several related facts so I will read every result and compare the dates names and places before I decide "
    "which statement is right and then go on with the next step of the plan as agreed with the user today"
).split()
_DOCUMENT = (
    "The northern region lies between two rivers and has about three million inhabitants according to the last census while its capital "
    "was founded by traders in the middle ages and rebuilt after the great fire"
).split()


@dataclass(frozen=True)
class Assets:
    """The script of the benchmark."""

    calls: list[dict[str, Any]]
    """turns with a tool call: text, ids (64, the end token last; one word is split as the tokenizer would not)"""
    final: dict[str, Any]
    """the last turn: an answer"""
    documents: list[str]
    """what the tool returns, about 100 tokens each"""
    observation: list[int]
    """a document with the scaffold around it, as ids"""
    prompt: list[int]
    """a first context, as ids"""
    response_id: int
    """the token `<tool_response>`: as many as turns went before"""
    end_id: int
    vocabulary: str = "qwen"


def question(i: int) -> str:
    """The task's prompt."""
    return (
        f"Question {i}: which of the regions in list {i} has the larger population, and when was its capital founded? "
        "Compare at least three sources."
    )


def load() -> Assets:
    """The script; built if it is not there."""
    file = BUILD / "assets.json"
    if not (file.exists() and (MODEL / "config.json").exists()):
        build(file)
    return Assets(**json.loads(file.read_text()))


def make_agent_renderer() -> Renderer:
    """agentrl's renderer on the same vocabulary."""
    load()
    return make_renderer(Tokenizer.load(MODEL), "hermes")


def build(file: Path) -> None:
    """Make the model's folder and the script."""
    MODEL.mkdir(parents=True, exist_ok=True)
    vocabulary = _build_tokenizer(MODEL)
    tokenizer = Tokenizer.load(MODEL)
    config = {"vocab_size": tokenizer.backend.get_vocab_size(), "max_position_embeddings": CONTEXT}
    (MODEL / "config.json").write_text(json.dumps(config))
    renderer = make_renderer(tokenizer, "hermes")
    document = [_document(tokenizer, i) for i in range(64)]
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(0)}]
    schema = {"query": {"type": "string", "description": "what to search for"}}
    tool = {
        "name": "search",
        "description": "Search the corpus.",
        "parameters": {"type": "object", "properties": schema},
    }
    ((_, prompt),) = renderer.prompt(messages, [{"type": "function", "function": tool}])
    calls = [_turn(tokenizer, "I will think carefully.", _call(k)) for k in range(10)]
    answer = {"role": "tool", "name": "search", "tool_call_id": "call_0", "content": document[0]}
    delta = renderer.delta([answer], calls[0]["ids"])
    assets = Assets(
        calls=calls,
        final=_turn(tokenizer, "I will answer carefully.", f"\n<answer>{ANSWER}</answer>"),
        documents=document,
        observation=[i for _, ids in delta.pieces for i in ids],
        prompt=list(prompt),
        response_id=tokenizer.added["<tool_response>"],
        end_id=renderer.end_id,
        vocabulary=vocabulary,
    )
    file.write_text(json.dumps(vars(assets)))


def _build_tokenizer(folder: Path) -> str:
    """Qwen's if the packages are there, else from what is in the repository; which."""
    sys.path[:0] = [str(BUILD / "packages"), str(ROOT / "tests" / "render")]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    if importlib.util.find_spec("dashscope") and importlib.util.find_spec("trl"):
        from template_models import BY_NAME, template_source
        from template_models import tokenizer as real

        real("chatml", None).backend.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(template_source(BY_NAME["chatml"]), encoding="utf-8")
        return "qwen"
    backend = Backend.from_file(str(EMBEDDED))
    backend.add_tokens([AddedToken(t, normalized=False) for t in TAGS])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.lstrip(), encoding="utf-8")
    return "search_r1_3m"


def _call(k: int) -> str:
    query = f"capital and population of region number {k}"
    return f'\n<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


def _turn(tokenizer: Tokenizer, begin: str, end: str) -> dict[str, Any]:
    """64 tokens of text that begins and ends so, with the word 'carefully' split where the tokenizer would not."""
    for n in range(200):
        text = begin + "".join(f" {_FILL[i % len(_FILL)]}" for i in range(n)) + end
        whole = tokenizer.encode(text)
        word = text.index(" carefully")
        splits = (tokenizer.encode(text[: word + k]) + tokenizer.encode(text[word + k :]) for k in (6, 5, 4, 3, 7, 2))
        ids = next(s for s in splits if s != whole)
        if len(ids) >= TURN_TOKENS - 1:
            break
    if tokenizer.decode(ids) != text:
        raise RuntimeError("the split word does not read back")
    return {"text": text, "ids": [*ids, tokenizer.added["<|im_end|>"]]}


def _document(tokenizer: Tokenizer, number: int) -> str:
    text = f"Document {number}."
    for i in range(1000):
        text += f" {_DOCUMENT[(number + i) % len(_DOCUMENT)]}"
        if len(tokenizer.encode_plain(text)) >= DOCUMENT_TOKENS:
            break
    return text
