"""Every chat template of the `trl` package, with a tokenizer that knows its tokens: it is proven, or refused by name; nothing else."""

import re

import pytest
import tokenizers
from conversations import NOW, TOOLS
from template_models import data_file, vocabulary
from tokenizers import AddedToken
from transformers.utils import chat_template_utils

from agentrl.errors import TemplateError
from agentrl.render import Tokenizer, make_renderer
from agentrl.types import FinishReason

TOKEN = re.compile(
    r"<\|[\w:.-]{1,40}\|?>|<\w{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|\[/?[A-Z_]{3,}\]|<\w+_of_\w+>|</?(?:think|tool_call|tool_response|image|s)>"
)
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
REFUSED = {
    "idefics3": "leaves the assistant's text out",
    "smolvlm": "leaves the assistant's text out",
    "llava_next": "refuses a conversation",
}
"""templates that know contents in parts only"""
TEMPLATES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.full] if path.stem.endswith("_training") else [])
    for path in sorted(data_file("trl", "chat_templates", "").glob("*.jinja"))
]
USER = {"role": "user", "content": "What is 6 x 7?"}
RESULT = {"role": "tool", "name": "search", "tool_call_id": "abcdefgh0", "content": "found 42"}


def tokenizer_of(template):
    """A tokenizer with whatever in the template looks like a token."""
    base = vocabulary(6000)
    backend = tokenizers.Tokenizer(base.model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = base.normalizer, base.pre_tokenizer, base.decoder
    names = dict.fromkeys((*SPECIAL.values(), *TOKEN.findall(template)))
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in names])
    return Tokenizer(backend, chat_template=template, special=SPECIAL)


@pytest.mark.parametrize("path", TEMPLATES)
def test_it_is_proven_or_refused(path):
    template, name = path.read_text(encoding="utf-8"), path.stem.removesuffix("_training")
    if name in REFUSED:
        with pytest.raises(TemplateError, match=f"{path.stem}: its chat template {REFUSED[name]}"):
            make_renderer(tokenizer_of(template), where=path.stem)
        return
    ours = make_renderer(tokenizer_of(template), where=path.stem, now=NOW)
    sampled = ours.encode_turn({"role": "assistant", "content": "Mark5d0e"})
    for tools in ((), TOOLS):
        assert ours.prompt([USER], tools)
        for after in ([USER], [RESULT], [RESULT, RESULT], [{"role": "system", "content": "note"}, USER]):
            delta = ours.delta(after, sampled, history=[USER], tools=tools)
            assert bool(delta.new_segment) is not bool(delta.pieces)
    delta = ours.delta([USER], sampled, history=[USER], tools=())
    assert delta.new_segment is None
    compiled = chat_template_utils._compile_jinja_template(template)
    messages = ours._family.adapt([USER, ours.message(ours.parse(sampled, FinishReason.STOP, 8)), USER])
    whole = compiled.render(messages=messages, add_generation_prompt=True, strftime_now=NOW.strftime, **SPECIAL)
    after = whole.rpartition("Mark5d0e")[2]
    at, end = min((after.find(e), e) for e in ours.ends if e in after)
    theirs = ours.tokenizer.backend.encode(after[at + len(end) :], add_special_tokens=False).ids
    assert [i for _, ids in delta.pieces for i in ids] == theirs
