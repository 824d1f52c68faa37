"""The shielding law, and the fast encoder against the tokenizer itself."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from template_models import tokenizer, vocabulary
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from agentrl.errors import TemplateError
from agentrl.render import Tokenizer
from agentrl.render.bpe_cache import FastDecoder, FastEncoder

TOKEN_TEXTS = ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "<|im_", "end|>", "<", "|>")
content = st.lists(
    st.one_of(st.sampled_from(TOKEN_TEXTS), st.text(max_size=6), st.sampled_from((" ", "\n", "\t", "'s", "12")))
).map("".join)
ours = tokenizer("chatml")
added = set(ours.added.values())
FAST = FastEncoder.build(vocabulary(6000))
DECODER = FastDecoder.build(ours.backend)


@settings(max_examples=300)
@given(content, content)
def test_only_the_scaffolds_added_tokens_are_atomic(a, b):
    (sa, sb), base = ours.shield([a, b])
    ids = ours.encode_shielded(f"<|im_start|>{sa}<think>{sb}<|im_end|>\n", base)
    control = [i for i in ids if i in added]
    assert control == [ours.added[t] for t in ("<|im_start|>", "<think>", "<|im_end|>")]
    clean = lambda t: ours.encode_plain(t) if t else []  # noqa: E731
    assert ids == [control[0], *clean(a), control[1], *clean(b), control[2], *clean("\n")]


@settings(max_examples=300)
@given(content)
def test_without_added_tokens_in_it_the_ids_are_the_tokenizers_own(text):
    if not ours.pattern.search(text):
        (shielded,), base = ours.shield([text])
        whole = f"<|im_start|>user\n{shielded}<|im_end|>\n"
        assert (
            ours.encode_shielded(whole, base)
            == ours.backend.encode(whole.replace("\ud800", "\ufffd"), add_special_tokens=False).ids
        )


@settings(max_examples=300)
@given(content)
def test_scaffold_is_encoded_as_the_tokenizer_does(text):
    assert ours.encode(text) == ours.backend.encode(text, add_special_tokens=False).ids


@settings(max_examples=500)
@given(st.text())
def test_the_fast_encoder_gives_the_tokenizers_ids(text):
    assert FAST.encode(text) in (None, vocabulary(6000).encode(text, add_special_tokens=False).ids)


def test_the_fast_encoder_over_the_whole_plane():
    """Each character of the first plane in company, in one long text."""
    plain = vocabulary(6000)
    fast = FastEncoder.build(plain)
    for start in range(0x20, 0x10000, 0x400):
        text = "".join(f"a{chr(c)}b {chr(c)}\n" for c in range(start, start + 0x400, 5) if not 0xD800 <= c < 0xE000)
        assert fast.encode(text) in (None, plain.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def both():
    """Qwen's whole vocabulary, and the fast encoder of it."""
    return vocabulary(None), FastEncoder.build(vocabulary(None))


@pytest.mark.full
class TestTheRealVocabulary:
    """Qwen's, all of it: the fast encoder and decoder give the tokenizer's own."""

    def test_every_token_of_it(self, both):
        """The text of each token, alone and in company."""
        plain, fast = both
        decoder = FastDecoder.build(plain)
        n = plain.get_vocab_size()
        assert n > 150_000
        for i in range(n):
            text = plain.decode([i], skip_special_tokens=False)
            assert decoder.decode([i]) == text
            if "\ufffd" not in text:
                for company in (text, f"a{text}b", f" {text}\n{text}"):
                    assert fast.encode(company) in (None, plain.encode(company, add_special_tokens=False).ids), text

    def test_every_character(self, both):
        """Of all planes that have any, in the company of letters, digits, spaces and itself."""
        plain, fast = both
        refused = 0
        for start in (*range(0, 0x34000, 0x80), *range(0xE0000, 0xE0200, 0x80), *range(0xF0000, 0xF0200, 0x80)):
            chars = [chr(c) for c in range(start, start + 0x80) if not 0xD800 <= c < 0xE000]
            text = "".join(f"a{c}b {c}1{c}{c}\n" for c in chars)
            ids = fast.encode(text)
            refused += ids is None
            assert ids in (None, plain.encode(text, add_special_tokens=False).ids), hex(start)
        assert refused < 0x34000 / 0x80 / 4

    @settings(max_examples=5_000)
    @given(st.lists(st.one_of(st.text(max_size=12), st.sampled_from((*TOKEN_TEXTS, "'s", "'LL", "\r\n", "  ", "\u00a0", "１２", "e\u0301"))))
           .map("".join))  # fmt: skip
    def test_any_text(self, both, text):
        plain, fast = both
        assert fast.encode(text) in (None, plain.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("change", [
    lambda t: setattr(t, "normalizer", normalizers.NFKC()),
    lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
    lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace()),
])  # fmt: skip
def test_other_structures_go_the_slow_way(change):
    backend = tokenizers.Tokenizer(vocabulary(6000).model)
    change(backend)
    assert FastEncoder.build(backend) is None


@settings(max_examples=500)
@given(st.lists(st.integers(0, ours.backend.get_vocab_size() + 20), max_size=20))
def test_the_fast_decoder_gives_the_tokenizers_text(ids):
    """Also of ids that break characters, of control tokens, and of ids that are none."""
    assert DECODER.decode(ids) == ours.backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "decoder", [None, decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])]
)
def test_other_decoders_go_the_slow_way(decoder):
    backend = tokenizers.Tokenizer(vocabulary(6000).model)
    if decoder is not None:
        backend.decoder = decoder
    assert FastDecoder.build(backend) is None


def test_gpt2s_own_pattern_is_known():
    backend = tokenizers.Tokenizer(vocabulary(6000).model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = FastEncoder.build(backend)
    text = "I'll   say 123 x\n\n\t'RE é東京"
    assert fast.encode(text) == backend.encode(text).ids


def test_lone_surrogates_become_replacement_characters():
    assert ours.encode_plain("a\ud800b") == ours.encode_plain("a\ufffdb")
    assert ours.encode("a\ud800b") == ours.encode("a\ufffdb")


def test_content_may_use_private_characters():
    text = "\U000f0000 <|im_end|> \U00100000"
    (shielded,), base = ours.shield([text])
    assert ours.decode(ours.encode_shielded(shielded, base)) == text
    with pytest.raises(TemplateError, match="private-use"):
        ours.shield(["<|im_end|>\U000f0000\U00100000\U000f8000\U00108000"])


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
    (shielded,), base = t.shield(["  <|e|> a "])
    assert base
    theirs = t.backend.encode("<|e|>  b <|x|>  c <|x|>", add_special_tokens=False).ids
    assert t.encode_shielded("<|e|>  b <|x|>  c <|x|>", base) == theirs
    assert t.encode_shielded(f"<|x|>{shielded}<|x|>", base).count(t.added["<|e|>"]) == 0


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
