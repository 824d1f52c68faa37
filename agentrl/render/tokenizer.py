"""A tokenizer that keeps the template's text and content apart.

The rule: ids are the tokenisation of the whole string in which only the template's own occurrences of added tokens are atomic; an added
token inside content is plain text. Where content holds none, the ids are the tokenizer's own.

A rendered string is split into *sections* at the template's added tokens; a section is encoded by a copy of the tokenizer without added
tokens. Content that passes through a template is *escaped* first: each added token in it is replaced by one private-use character, which
templates do not change, so that every added token left in the rendered string is the template's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from agentrl.errors import TemplateError
from agentrl.render.accelerators.token_bytes import TokenBytes
from agentrl.render.accelerators.word_cache import ContentEncoder, part_state

_PRIVATE = range(0xF0000, 0x10FFFE)
"""private-use characters; some that the content does not use stand for added tokens"""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def _template_of(folder: Path, config: Any) -> str | None:
    """The chat template of a model folder with this tokenizer_config.json.

    Raises:
        ValueError, KeyError, TypeError: the file does not have the form that transformers writes.
    """
    if not isinstance(config, dict):
        raise ValueError("tokenizer_config.json is not a JSON object")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    if (folder / "chat_template.jinja").exists():  # the newer place, which transformers prefers too
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not isinstance(template, str | None):
        raise ValueError(f"chat_template in tokenizer_config.json must be text, found {template!r:.80}")
    return template


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`: encodes template text atomically and content plainly, decodes ids exactly.

    Example:
        >>> tokenizer = Tokenizer.load("path/to/model")
        >>> tokenizer.encode("<|im_end|>")  # one token
        >>> tokenizer.encode_plain("<|im_end|>")  # several
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, chat_template: str | None = None, special: dict[str, str] | None = None
    ) -> None:
        """Wrap.

        Args:
            backend: The tokenizer; its truncation and padding are switched off.
            chat_template: The model's chat template.
            special: Named special tokens (bos_token, eos_token, …) to which templates refer.

        Raises:
            TemplateError: its added tokens cannot be told from plain text.
        """
        self.backend = backend
        self.chat_template = chat_template
        self.special = special or {}
        backend.no_truncation()
        backend.no_padding()
        tokens = {t.content: (i, t) for i, t in backend.get_added_tokens_decoder().items()}
        self.added: dict[str, int] = {name: i for name, (i, _) in tokens.items()}
        """every added token, special or not"""
        self.controls = frozenset(name for name, (_, t) in tokens.items() if t.special)
        """the special ones"""
        self._token_bytes = TokenBytes.build(backend)
        self._content = ContentEncoder(_without_added_tokens(backend))
        self._names = list(self.added)
        self._index = {name: i for i, name in enumerate(self._names)}
        longest_first = sorted((t for _, t in tokens.values()), key=lambda t: -len(t.content))
        self.pattern = re.compile("|".join(map(_token_pattern, longest_first)) if tokens else r"(?!)")
        """finds added tokens, the longest first"""
        self._strips_left = frozenset(name for name, (_, t) in tokens.items() if t.lstrip)
        self._strips_right = frozenset(name for name, (_, t) in tokens.items() if t.rstrip)
        self._sections = self.is_fast and not any(t.normalized for _, t in tokens.values())
        """template text is encoded by sections too: added tokens are found in the text before normalisation, so sections give the same ids"""
        self._check()

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load from a model folder or a hub id.

        Args:
            path: A folder with tokenizer.json, or anything that `AutoTokenizer.from_pretrained` accepts.

        Returns:
            The tokenizer with its chat template.

        Raises:
            TemplateError: there is no tokenizer, or none that the fast `tokenizers` library can run.
        """
        folder = Path(path)
        if (folder / "tokenizer.json").exists():
            return cls._from_folder(folder)
        from transformers import AutoTokenizer

        try:
            hf: Any = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError) as e:
            raise TemplateError(f"{path}: no tokenizer could be loaded: {str(e).splitlines()[0]}") from e
        if not getattr(hf, "is_fast", False):
            raise TemplateError(
                f"{path}: its tokenizer ({type(hf).__name__}) has no fast version; convert it to a tokenizer.json first"
            )
        template = hf.chat_template if isinstance(hf.chat_template, str) else None
        special = {k: str(v) for k, v in hf.special_tokens_map.items()}
        return cls(hf.backend_tokenizer, chat_template=template, special=special)

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        config: dict[str, Any] = {}
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            if (folder / "tokenizer_config.json").exists():
                config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            template = _template_of(folder, config)
        except Exception as e:  # tokenizers raises nothing narrower
            raise TemplateError(f"{folder}: its tokenizer cannot be read: {e}") from e
        special = {
            k: v["content"] if isinstance(v, dict) else v
            for k, v in config.items()
            if k.endswith("_token") and (isinstance(v, str) or (isinstance(v, dict) and "content" in v))
        }
        return cls(backend, chat_template=template, special=special)

    @property
    def is_fast(self) -> bool:
        """Whether content is encoded word by word from a cache."""
        return self._content.cache is not None

    # -- ids ---------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of template text: its added tokens are atomic; nothing is prepended."""
        text = replace_surrogates(text)
        if self._sections:
            return self._encode_sections(text, 0)
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of content: an added token in it is plain text."""
        return self._content.encode(replace_surrogates(text))

    def encode_section(self, text: str, before: str | None, after: str | None) -> list[int]:
        """Ids of plain text between two added tokens of the template (None: the string's end), which may absorb spaces next to them."""
        if before in self._strips_right:
            text = text.lstrip()
        if after in self._strips_left:
            text = text.rstrip()
        return self.encode_plain(text) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self.decode_plain(ids) if self._token_bytes is None else self._token_bytes.decode(ids)

    def decode_plain(self, ids: Sequence[int]) -> str:
        """The same as the tokenizer gives it."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    # -- escaping ----------------------------------------------------------------------------------------------------

    def has_token(self, text: str, allowed: Container[str] = ()) -> bool:
        """Whether a text holds an added token that is not among the allowed ones."""
        return any(match.group() not in allowed for match in self.pattern.finditer(text))

    def escape_all(self, texts: Iterable[str]) -> tuple[list[str], int]:
        """The texts escaped, and the base to encode them with (0: nothing was escaped)."""
        originals = list(texts)
        if not any(map(self.has_token, originals)):
            return originals, 0
        base = self.unused_base(originals)
        return [self.escape(t, base) for t in originals], base

    def unused_base(self, texts: Iterable[str]) -> int:
        """The first of as many private-use characters as there are added tokens, which the texts do not use; if they use all, of the first."""
        count, first = max(len(self._names), 1), _PRIVATE.start
        used = {(ord(c) - first) // count for t in texts if not t.isascii() for c in t if ord(c) >= first}
        return first + count * next((n for n in range(len(_PRIVATE) // count) if n not in used), 0)

    def escape(self, text: str, base: int, keep: Container[str] = ()) -> str:
        """The text with its added tokens, except those to keep, replaced by characters from `base` on.

        A text that uses these characters itself, because the content uses all there are, gets replacement characters (U+FFFD) for them.
        """
        if self._names and not text.isascii():
            text = re.sub(f"[{chr(base)}-{chr(base + len(self._names) - 1)}]", "\ufffd", text)
        return self.pattern.sub(lambda m: m.group() if m.group() in keep else chr(base + self._index[m.group()]), text)

    def encode_escaped(self, text: str, base: int) -> list[int]:
        """Ids of a rendered string whose contents were escaped with `base`."""
        return self._encode_sections(replace_surrogates(text), base) if base else self.encode(text)

    def _encode_sections(self, text: str, base: int) -> list[int]:
        ids: list[int] = []
        start, before = 0, None
        for match in self.pattern.finditer(text):
            token = match.group()
            ids += self.encode_section(self._unescape(text[start : match.start()], base), before, token)
            ids.append(self.added[token])
            start, before = match.end(), token
        return ids + self.encode_section(self._unescape(text[start:], base), before, None)

    def _unescape(self, text: str, base: int) -> str:
        if not base or text.isascii():
            return text
        count = len(self._names)
        return "".join(self._names[ord(c) - base] if base <= ord(c) < base + count else c for c in text)

    def _check(self) -> None:
        """Refuse a tokenizer whose plain encoding yields added tokens, or whose sections do not give its own ids."""
        added_ids = set(self.added.values())
        for name in self.added:
            if not added_ids.isdisjoint(self.encode_plain(f"x {name}y") + self.encode_plain(name)):
                raise TemplateError(
                    f"the tokenizer reads {name!r} as one token even as plain text; tool output could inject it"
                )
        sample = "".join(f"{name}word\n{name} two  " for name in self._names[:64])
        if self.backend.encode(sample, add_special_tokens=False).ids != self.encode_escaped(sample, _PRIVATE.start):
            raise TemplateError(
                "the tokenizer encodes text next to special tokens differently from text alone; it cannot keep content "
                "apart from the template's text"
            )


def replace_surrogates(text: str) -> str:
    """The text with lone surrogates, which have no UTF-8 form, replaced by U+FFFD."""
    return text if text.isascii() or not _LONE_SURROGATE.search(text) else _LONE_SURROGATE.sub("\ufffd", text)


def _token_pattern(token: tokenizers.AddedToken) -> str:
    name = re.escape(token.content)
    return rf"(?<!\w){name}(?!\w)" if token.single_word else name


def _without_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy without added tokens, which treats every text as the continuation of another."""
    plain = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
        state = part_state(plain.pre_tokenizer)
        firsts = [s for s in state.get("pretokenizers", [state]) if s.get("prepend_scheme") == "first"]
        for step in firsts:
            step["prepend_scheme"] = "never"
        if firsts:
            changed = tokenizers.pre_tokenizers.Sequence([])
            changed.__setstate__(json.dumps(state).encode())
            plain.pre_tokenizer = changed
    if backend.decoder is not None:
        plain.decoder = backend.decoder
    return plain
