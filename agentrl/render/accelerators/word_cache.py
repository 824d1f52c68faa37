"""Encoding content word by word from a cache, where that provably gives the tokenizer's own ids.

Byte-level BPE splits a text into words with a regular expression and encodes each word separately, so the ids of words can be kept. The
tokenizer's own model encodes the words. What must be proven is that the `regex` library splits a text where the tokenizer does:

- structure: the tokenizer's JSON must describe BPE with one Split on one pattern, then ByteLevel, with at most an NFC normaliser (or
  GPT-2's ByteLevel alone);
- characters: both engines run the same pattern, so they can differ only in the class of a character. Every character is tried in several
  contexts before the first text that holds it is split here; texts with a character that is split differently go to the tokenizer.
"""

from __future__ import annotations

import json
from itertools import accumulate, chain
from typing import Any

import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MAX_WORDS = 200_000
_MAX_WORD_LENGTH = 64
_CONTEXTS = (
    "a{}b", "{}", "1{}2", " {} ", "A{}", "\n{}\n", ".{}.", "'{}", "{}{}", "\t{}a", "/{}\r\n", "\u4e2d{}\u4e2d", "é{} x",
)  # fmt: skip
_PROBES = (
    "I'll say 'it's' WE'RE  3,141.59  \n\n  end.\r\n\tdef f(x):\n\t\treturn {'a': [1, 2]}  # ok\n",
    "Größe naïve Ελληνικά русский 中文字符 日本語テキスト 한국어 हिन्दी العربية 😀👩‍👩‍👧 e\u0301 \u00a0\u3000x\u2028y",
    '<|im_end|>\n<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"q": "1\\n2"}}</tool_call>   ',
)


class ContentEncoder:
    """Ids of texts in which nothing is an added token."""

    def __init__(self, plain: tokenizers.Tokenizer) -> None:
        """`plain`: a tokenizer without added tokens."""
        self._plain = plain
        self.cache = WordCache.build(plain)
        """None: the tokenizer is not of the proven structure"""

    def encode(self, text: str) -> list[int]:
        """The ids, from the cache where possible."""
        ids = self.cache.encode(text) if self.cache is not None else None
        return self.encode_plain(text) if ids is None else ids

    def encode_plain(self, text: str) -> list[int]:
        """The ids as the tokenizer gives them."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids


class WordCache:
    """Ids by word."""

    def __init__(self, plain: tokenizers.Tokenizer, pattern: Any) -> None:
        self._tokenize = plain.model.tokenize
        self._letters = byte_letters()
        self._find_words = pattern.findall
        self._normalize = plain.normalizer.normalize_str if plain.normalizer is not None else None
        self._split = plain.pre_tokenizer.pre_tokenize_str
        self._words: dict[str, tuple[int, ...]] = {}
        self._proven: set[str] = set()
        """characters that both engines treat alike"""
        self._different: set[str] = set()

    @classmethod
    def build(cls, plain: tokenizers.Tokenizer) -> WordCache | None:
        """The cache for a tokenizer without added tokens, or None if it is not of the proven structure."""
        source = _word_pattern(plain)
        if source is None:
            return None
        try:
            import regex  # type: ignore[import-untyped]

            cache = cls(plain, regex.compile(source))
        except (ImportError, ValueError):
            return None
        for probe in _PROBES:
            if cache.encode(probe) not in (None, plain.encode(probe, add_special_tokens=False).ids):
                return None
        return cache

    def encode(self, text: str) -> list[int] | None:
        """The ids, or None where the tokenizer itself must encode."""
        if self._normalize is not None and not text.isascii():
            text = self._normalize(text)
        if not self._proven.issuperset(text) and not self._prove(set(text) - self._proven):
            return None
        words = self._find_words(text)
        ids = list(map(self._words.get, words))
        if not all(ids):
            ids = [known or self._encode_word(word) for known, word in zip(ids, words, strict=True)]
        return list(chain.from_iterable(ids))  # type: ignore[arg-type]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        """The ids of a new word. The model alone takes half the time of the tokenizer; it expects bytes as letters."""
        letters = "".join([self._letters[b] for b in word.encode()])
        ids = tuple([token.id for token in self._tokenize(letters)])
        if len(self._words) >= _MAX_WORDS:
            self._words.clear()
        if len(word) <= _MAX_WORD_LENGTH:
            self._words[word] = ids
        return ids

    def _prove(self, chars: set[str]) -> bool:
        """Try new characters; False if one of them is split differently."""
        for char in chars - self._different:
            same = all(self._splits_alike(context.replace("{}", char)) for context in _CONTEXTS)
            (self._proven if same else self._different).add(char)
        return not chars & self._different

    def _splits_alike(self, text: str) -> bool:
        """Whether both engines split this text at the same places, and lose none of it."""
        words = self._find_words(text)
        ends = [end for _, (_, end) in self._split(text)]
        return "".join(words) == text and list(accumulate(map(len, words))) == ends


def part_state(part: Any) -> dict[str, Any]:
    """The JSON form of one part of a tokenizer."""
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + i) for i in range(256))
    return [chr(b) if b in kept else next(others) for b in range(256)]


def _word_pattern(plain: tokenizers.Tokenizer) -> str | None:
    """The pattern that splits a text into words, if the tokenizer is of the proven structure."""
    model = plain.model
    if type(model).__name__ != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if plain.pre_tokenizer is None:
        return None
    if plain.normalizer is not None and part_state(plain.normalizer).get("type") != "NFC":
        return None
    state = part_state(plain.pre_tokenizer)
    *before, last = state.get("pretokenizers") or [state]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not before:
        return _GPT2 if last.get("use_regex", True) else None
    split = before[0]
    if len(before) > 1 or split.get("type") != "Split" or last.get("use_regex", True):
        return None
    isolated = split.get("behavior") == "Isolated" and not split.get("invert")
    return (split["pattern"].get("Regex") or None) if isolated else None
