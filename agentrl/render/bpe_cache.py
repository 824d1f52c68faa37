"""A faster encoder and decoder for byte-level BPE, used only where they give the tokenizer's own ids and text.

Byte-level BPE cuts a text into words with a regular expression and encodes each word alone, so ids of words can be kept. The words
themselves are encoded by the tokenizer; what has to be proven is that `regex` cuts a text where the tokenizer does. Structure: the
tokenizer's JSON must say exactly 'BPE, one Split on one pattern, ByteLevel, at most an NFC normaliser' (or GPT-2's ByteLevel alone).
Characters: both engines run the same pattern, so they can only differ in what class they put a character in; every character is
tried in all kinds of company before the first text that holds it is encoded here, and texts that hold one that differs go the slow way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII = {"L": "a-zA-Z", "N": "0-9", "Nd": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
"""what of a Unicode class is ASCII"""
_MAX_WORDS = 200_000
_COMPANY = (
    "a{}b",
    "{}",
    "1{}2",
    " {} ",
    "A{}",
    "\n{}\n",
    ".{}.",
    "'{}",
    "{}{}",
    "\t{}a",
    "/{}\r\n",
    "\u4e2d{}\u4e2d",
    "é{} x",
)
_PROBES = (
    "I'll say 'it's' WE'RE  3,141.59  \n\n  end.\r\n\tdef f(x):\n\t\treturn {'a': [1, 2]}  # ok\n",
    "Größe naïve Ελληνικά русский 中文字符 日本語テキスト 한국어 हिन्दी العربية 😀👩‍👩‍👧 e\u0301 \u00a0\u3000x\u2028y",
    '<|im_end|>\n<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"q": "1\\n2"}}</tool_call>   ',
)


class FastDecoder(dict[int, bytes]):
    """Text of ids: the bytes of every token, joined. For byte-level decoders alone, and tried on awkward ids before it is used."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._token = backend.id_to_token
        self._bytes = {c: b for b, c in _letters().items()}

    @classmethod
    def build(cls, backend: tokenizers.Tokenizer) -> FastDecoder | None:
        """The decoder for a tokenizer, or None if its own works otherwise."""
        if backend.decoder is None or part_state(backend.decoder).get("type") != "ByteLevel":
            return None
        decoder = cls(backend)
        n, added = backend.get_vocab_size(), list(backend.get_added_tokens_decoder())
        strides = [list(range(start, n, step)) for start, step in ((0, 997), (1, 1013), (5, 1231))]
        around = [i for a in added for i in (a, 100, a, a, 200, 150)]
        for ids in (*strides, list(range(min(n, 512))), list(range(min(n, 400), 0, -3)), around, [n + 9, 5]):
            if decoder.decode(ids) != backend.decode(ids, skip_special_tokens=False):
                return None
        return decoder

    def decode(self, ids: Sequence[int]) -> str:
        """What the tokenizer's own `decode` gives, special tokens shown."""
        return b"".join([self[i] for i in ids]).decode("utf-8", "replace")

    def __missing__(self, token_id: int) -> bytes:
        token = self._token(token_id) or ""
        try:
            found = bytes([self._bytes[c] for c in token])
        except KeyError:  # an added token, written as it is
            found = token.encode()
        self[token_id] = found
        return found


class FastEncoder:
    """Ids of content, word by word, from a cache."""

    def __init__(self, plain: tokenizers.Tokenizer, pattern: Any) -> None:
        self._tokenize = plain.model.tokenize
        self._letters = list(map(_letters().__getitem__, range(256)))
        self._findall = pattern.findall
        self._normalize = plain.normalizer.normalize_str if plain.normalizer is not None else None
        self._split = plain.pre_tokenizer.pre_tokenize_str
        self._words: dict[str, tuple[int, ...]] = {}
        self._good: set[str] = set()
        self._bad: set[str] = set()
        self._findall_ascii = self._quicker(pattern.pattern)

    @classmethod
    def build(cls, plain: tokenizers.Tokenizer) -> FastEncoder | None:
        """The encoder for a tokenizer without added tokens, or None if it is not of the one proven structure."""
        source = _pattern(plain)
        if source is None:
            return None
        try:
            import regex  # type: ignore[import-untyped]

            encoder = cls(plain, regex.compile(source))
        except (ImportError, ValueError):
            return None
        for probe in _PROBES:
            if encoder.encode(probe) not in (None, plain.encode(probe, add_special_tokens=False).ids):
                return None
        return encoder

    def encode(self, text: str) -> list[int] | None:
        """The ids, or None where the tokenizer itself must be asked."""
        find = self._findall
        if self._findall_ascii is not None and text.isascii():
            find = self._findall_ascii
        else:
            if self._normalize is not None and not text.isascii():
                text = self._normalize(text)
            if not self._good.issuperset(text) and not self._learn(set(text) - self._good):
                return None
        words = find(text)
        known = list(map(self._words.get, words))
        if not all(known):
            known = [k or self._encode_word(word) for k, word in zip(known, words, strict=True)]
        return list(chain.from_iterable(known))  # type: ignore[arg-type]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        ids = self._new(word)
        if len(self._words) >= _MAX_WORDS:
            self._words.clear()
        if len(word) <= 64:
            self._words[word] = ids
        return ids

    def _new(self, word: str) -> tuple[int, ...]:
        """The ids of a word: its bytes, written as letters, merged by the model alone, which takes half the time of `encode`."""
        letters = "".join([self._letters[b] for b in word.encode()])
        return tuple([token.id for token in self._tokenize(letters)])

    def _quicker(self, source: str) -> Any:
        """The pattern for the standard library's `re`, which is twice as fast on ASCII; None unless all of ASCII is cut as it should be."""
        try:
            find = re.compile(_for_ascii(source), re.ASCII).findall
        except (KeyError, re.error):
            return None
        companies = [c for c in _COMPANY if c.isascii()]
        texts = [c.replace("{}", chr(i)) for i in range(128) for c in companies] + [p for p in _PROBES if p.isascii()]
        return find if all(self._same(text, find) for text in texts) else None

    def _learn(self, chars: set[str]) -> bool:
        """Try new characters; False if one of the text's is cut differently."""
        for char in chars - self._bad:
            alike = all(self._same(company.replace("{}", char)) for company in _COMPANY)
            (self._good if alike else self._bad).add(char)
        return not chars & self._bad

    def _same(self, text: str, find: Any = None) -> bool:
        """Do both cut this text at the same places (and lose none of it)?"""
        words = (find or self._findall)(text)
        ends: list[int] = []
        for word in words:
            ends.append((ends[-1] if ends else 0) + len(word))
        theirs = [end for _, (_, end) in self._split(text)]
        return "".join(words) == text and ends == theirs


def _for_ascii(source: str) -> str:
    """The pattern with Unicode's classes written as ASCII ranges.

    Raises:
        KeyError: it holds a class that is not listed here, or that no ASCII character is in.
    """
    parts: list[str] = []
    inside = False
    for part in re.findall(r"\\p\{\w+\}|\\.|.", source, re.DOTALL):
        if part.startswith("\\p{"):
            letters = _ASCII[part[3:-1]]
            if not (letters or inside):
                raise KeyError(part)
            parts.append(letters if inside else f"[{letters}]")
            continue
        inside = part == "[" or (inside and part != "]")
        parts.append(part)
    return "".join(parts)


def _letters() -> dict[int, str]:
    """GPT-2's way of writing bytes as letters."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def part_state(part: Any) -> dict[str, Any]:
    """The JSON form of one part of a tokenizer."""
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _pattern(plain: tokenizers.Tokenizer) -> str | None:
    """The pattern that cuts a text into words, if the tokenizer is of the proven structure."""
    model = plain.model
    if type(model).__name__ != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if plain.pre_tokenizer is None or (
        plain.normalizer is not None and part_state(plain.normalizer).get("type") != "NFC"
    ):
        return None
    pre = part_state(plain.pre_tokenizer)
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    if any(s.get("type") == "ByteLevel" and s.get("add_prefix_space") for s in steps):
        return None
    if len(steps) == 1 and steps[0].get("type") == "ByteLevel" and steps[0].get("use_regex", True):
        return _GPT2
    if (
        len(steps) == 2
        and steps[0].get("type") == "Split"
        and steps[1].get("type") == "ByteLevel"
        and not steps[1].get("use_regex", True)
    ):
        split = steps[0]
        source = split["pattern"].get("Regex")
        if split.get("behavior") == "Isolated" and not split.get("invert") and source:
            return str(source)
    return None
