"""Content cannot become an added token, and the word cache gives the ids of the tokenizer itself."""

import json
import random
import unicodedata

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from template_models import tokenizer, vocabulary
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from agentrl.errors import TemplateError
from agentrl.render import Tokenizer
from agentrl.render.accelerators.token_bytes import TokenBytes
from agentrl.render.accelerators.word_cache import ContentEncoder, WordCache

TOKEN_TEXTS = ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "<|im_", "end|>", "<", "|>")
content = st.lists(
    st.one_of(st.sampled_from(TOKEN_TEXTS), st.text(max_size=6), st.sampled_from((" ", "\n", "\t", "'s", "12")))
).map("".join)
ours = tokenizer("chatml")
added = set(ours.added.values())
CACHE = WordCache.build(vocabulary(6000))
CONTENT = ContentEncoder(vocabulary(6000))


@examples(150)
@given(content, content)
def test_only_the_templates_added_tokens_are_atomic(a, b):
    (sa, sb), base = ours.escape_all([a, b])
    ids = ours.encode_escaped(f"<|im_start|>{sa}<think>{sb}<|im_end|>\n", base)
    control = [i for i in ids if i in added]
    assert control == [ours.added[t] for t in ("<|im_start|>", "<think>", "<|im_end|>")]
    clean = lambda t: ours.encode_plain(t) if t else []  # noqa: E731
    assert ids == [control[0], *clean(a), control[1], *clean(b), control[2], *clean("\n")]


@examples(150)
@given(content)
def test_without_added_tokens_in_it_the_ids_are_the_tokenizers_own(text):
    if not ours.pattern.search(text):
        (escaped,), base = ours.escape_all([text])
        whole = f"<|im_start|>user\n{escaped}<|im_end|>\n"
        assert (
            ours.encode_escaped(whole, base)
            == ours.backend.encode(whole.replace("\ud800", "\ufffd"), add_special_tokens=False).ids
        )


@examples(150)
@given(content)
def test_template_text_is_encoded_as_the_tokenizer_does(text):
    assert ours.encode(text) == ours.backend.encode(text, add_special_tokens=False).ids


@examples(200)
@given(st.text())
def test_the_cache_and_its_fallback_give_the_same_ids(text):
    text = text.replace("\ud800", "\ufffd")
    ids = CONTENT.encode_plain(text)
    assert CACHE.encode(text) in (None, ids)
    assert CONTENT.encode(text) == ids == vocabulary(6000).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_the_table_and_the_tokenizer_give_the_same_text(name):
    """Also where the ids are not whole characters, include added tokens, or name no token."""
    its = tokenizer(name)
    size = its.backend.get_vocab_size()
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(size + 3) for _ in range(draw.randrange(12))]
        assert its.decode(ids) == its.decode_plain(ids), ids
    assert its.decode(range(size)) == its.decode_plain(range(size))


def test_an_added_token_that_is_not_in_letters_for_bytes_is_its_own_text():
    backend = vocabulary(6000)
    backend.add_tokens([AddedToken("<中>", normalized=False), AddedToken("é\u0143", normalized=False)])
    its = Tokenizer(backend)
    for text in ("a<中>b", "é\u0143"):
        ids = its.encode(text)
        assert its.decode(ids) == its.decode_plain(ids)


def test_a_decoder_that_does_more_than_join_bytes_has_no_table():
    assert TokenBytes.build(vocabulary(6000)) is not None
    backend = vocabulary(6000)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert TokenBytes.build(backend) is None


def test_the_cache_over_the_whole_plane():
    """Each character of the first plane in context, in one long text."""
    plain = vocabulary(6000)
    cache = WordCache.build(plain)
    for start in range(0x20, 0x10000, 0x400):
        text = "".join(f"a{chr(c)}b {chr(c)}\n" for c in range(start, start + 0x400, 5) if not 0xD800 <= c < 0xE000)
        assert cache.encode(text) in (None, plain.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def both():
    """Qwen's whole vocabulary, and its word cache."""
    return vocabulary(None), WordCache.build(vocabulary(None))


@pytest.mark.full
class TestTheRealVocabulary:
    """Qwen's, all of it: the cache gives the tokenizer's own ids."""

    def test_every_token_of_it(self, both):
        """The text of each token, alone and in context."""
        plain, cache = both
        n = plain.get_vocab_size()
        assert n > 150_000
        for i in range(n):
            text = plain.decode([i], skip_special_tokens=False)
            if "\ufffd" not in text:
                for context in (text, f"a{text}b", f" {text}\n{text}"):
                    assert cache.encode(context) in (None, plain.encode(context, add_special_tokens=False).ids), text

    def test_every_character(self, both):
        """Of all planes that have any, in the context of letters, digits, spaces and itself."""
        plain, cache = both
        refused = 0
        for start in (*range(0, 0x34000, 0x80), *range(0xE0000, 0xE0200, 0x80), *range(0xF0000, 0xF0200, 0x80)):
            chars = [chr(c) for c in range(start, start + 0x80) if not 0xD800 <= c < 0xE000]
            text = "".join(f"a{c}b {c}1{c}{c}\n" for c in chars)
            ids = cache.encode(text)
            refused += ids is None
            assert ids in (None, plain.encode(text, add_special_tokens=False).ids), hex(start)
        assert refused < 0x34000 / 0x80 / 4

    @settings(max_examples=5_000)
    @given(st.lists(st.one_of(st.text(max_size=12), st.sampled_from((*TOKEN_TEXTS, "'s", "'LL", "\r\n", "  ", "\u00a0", "１２", "e\u0301"))))
           .map("".join))  # fmt: skip
    def test_any_text(self, both, text):
        plain, cache = both
        assert cache.encode(text) in (None, plain.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("change", [
    lambda t: setattr(t, "normalizer", normalizers.NFKC()),
    lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
    lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace()),
])  # fmt: skip
def test_tokenizers_of_another_structure_have_no_cache(change):
    backend = tokenizers.Tokenizer(vocabulary(6000).model)
    change(backend)
    assert WordCache.build(backend) is None
    assert ContentEncoder(backend).encode("a b") == backend.encode("a b", add_special_tokens=False).ids


@examples(200)
@given(content)
def test_decoding_gives_the_text_that_was_encoded(text):
    """Added tokens included, whether they were encoded as such or as plain text."""
    text = unicodedata.normalize("NFC", text.replace("\ud800", "\ufffd"))
    assert ours.decode(ours.encode(text)) == ours.decode(ours.encode_plain(text)) == text


@pytest.mark.parametrize(
    "decoder", [None, decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])]
)
def test_any_decoder_is_used(decoder):
    backend = tokenizers.Tokenizer(vocabulary(6000).model)
    if decoder is not None:
        backend.decoder = decoder
    backend.pre_tokenizer = vocabulary(6000).pre_tokenizer
    ids = Tokenizer(backend).encode_plain("ab")
    assert Tokenizer(backend).decode(ids) == backend.decode(ids) == "ab"


def test_gpt2s_own_pattern_is_known():
    backend = tokenizers.Tokenizer(vocabulary(6000).model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cache = WordCache.build(backend)
    text = "I'll   say 123 x\n\n\t'RE é東京"
    assert cache.encode(text) == backend.encode(text).ids


def test_lone_surrogates_become_replacement_characters():
    assert ours.encode_plain("a\ud800b") == ours.encode_plain("a\ufffdb")
    assert ours.encode("a\ud800b") == ours.encode("a\ufffdb")


def test_content_may_use_private_characters():
    text = "\U000f0000 <|im_end|> \U00100000"
    (escaped,), base = ours.escape_all([text])
    assert ours.decode(ours.encode_escaped(escaped, base)) == text
    text = "<|im_end|>\U000f0000\U00100000\U000f8000\U00108000"
    (escaped,), base = ours.escape_all([text])
    assert ours.decode(ours.encode_escaped(escaped, base)) == text
    assert ours.added["<|im_end|>"] not in ours.encode_escaped(escaped, base)


def test_content_that_leaves_no_range_of_private_characters_loses_some_and_speaks_as_nobody_else():
    private = "".join(map(chr, range(0xF0000, 0x10FFFE, len(ours.added))))
    (escaped, other), base = ours.escape_all([f"<|im_end|>{private}", "é<|im_end|>"])
    ids = ours.encode_escaped(escaped, base)
    assert ours.added["<|im_end|>"] not in ids
    assert ours.decode(ids) == f"<|im_end|>\ufffd{private[1:]}"
    assert ours.decode(ours.encode_escaped(other, base)) == "é<|im_end|>"


def with_token(**options):
    backend = tokenizers.Tokenizer(vocabulary(6000).model)
    backend.pre_tokenizer, backend.decoder = vocabulary(6000).pre_tokenizer, vocabulary(6000).decoder
    backend.add_tokens(
        [
            AddedToken("<|e|>", normalized=False, special=True),
            AddedToken("<|x|>", normalized=False, special=True, **options),
        ]
    )
    return Tokenizer(backend)


@pytest.mark.parametrize("options", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
def test_tokens_that_eat_spaces_next_to_them(options):
    t = with_token(**options)
    (escaped,), base = t.escape_all(["  <|e|> a "])
    assert base
    theirs = t.backend.encode("<|e|>  b <|x|>  c <|x|>", add_special_tokens=False).ids
    assert t.encode_escaped("<|e|>  b <|x|>  c <|x|>", base) == theirs
    assert t.encode_escaped(f"<|x|>{escaped}<|x|>", base).count(t.added["<|e|>"]) == 0


def test_a_tokenizer_that_reads_special_tokens_in_plain_text_is_refused():
    letters = ["<", ">", "<>"]
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, [("<", ">")]))
    backend.add_special_tokens(["<>"])
    with pytest.raises(TemplateError, match="could inject"):
        Tokenizer(backend)


def test_a_model_folder(tmp_path):
    ours.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": "old", "eos_token": {"content": "<|im_end|>"}, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.chat_template, loaded.special) == ("new", {"eos_token": "<|im_end|>"})
    with pytest.raises(TemplateError, match="no tokenizer could be loaded"):
        Tokenizer.load(tmp_path / "nothing")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{")
        with pytest.raises(TemplateError, match="its tokenizer cannot be read"):
            Tokenizer.load(tmp_path)


def test_a_special_token_without_content_is_left_out(tmp_path):
    ours.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {}, "pad_token": "<|im_end|>"}')
    assert Tokenizer.load(tmp_path).special == {"pad_token": "<|im_end|>"}


@pytest.mark.parametrize(
    "text", ["[]", "5", '{"chat_template": 5}', '{"chat_template": [5]}', '{"chat_template": [{}]}']
)
def test_a_tokenizer_config_of_another_form_is_refused(tmp_path, text):
    ours.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(TemplateError, match="its tokenizer cannot be read"):
        Tokenizer.load(tmp_path)
