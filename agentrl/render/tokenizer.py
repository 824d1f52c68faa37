"""A tokenizer that keeps scaffold and content apart.

The law (design §5.3): ids = the tokenisation of the whole string in which only the scaffold's occurrences of added tokens are
atomic; an added token that occurs inside content is plain text. Where content holds none, the ids are the tokenizer's own.

A rendered string falls into *sections* at the scaffold's added tokens; a section is encoded by a copy of the tokenizer that knows no
added tokens. Content that is put through a template is *shielded* first: each added token in it is swapped for one private-use
character, which no template touches, so that every added token left in the rendered string is the scaffold's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from agentrl.errors import TemplateError
from agentrl.render.bpe_cache import FastDecoder, FastEncoder, part_state

_BASES = (0xF0000, 0x100000, 0xF8000, 0x108000)
"""where private-use stand-ins may start; one whose range the content does not use is taken"""
_LONE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`: encode scaffold atomically and content plainly, decode ids exactly."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, chat_template: str | None = None, special: dict[str, str] | None = None
    ) -> None:
        """`special` holds the named special tokens (bos_token, eos_token, …) that templates refer to.

        Raises:
            TemplateError: its added tokens cannot be told from plain text.
        """
        self.backend = backend
        self.chat_template = chat_template
        self.special = special or {}
        backend.no_truncation()
        backend.no_padding()
        added = {t.content: (i, t) for i, t in backend.get_added_tokens_decoder().items()}
        self.added: dict[str, int] = {name: i for name, (i, _) in added.items()}
        """every added token, special or not"""
        self.controls = frozenset(name for name, (_, t) in added.items() if t.special)
        """the special ones"""
        self._plain = _without_added(backend)
        self._fast = FastEncoder.build(self._plain)
        self._fast_decoder = FastDecoder.build(backend)
        self._names = list(self.added)
        self._index = {name: i for i, name in enumerate(self._names)}
        self.pattern = (
            re.compile("|".join(_matcher(t) for _, t in sorted(added.values(), key=lambda v: -len(v[1].content))))
            if added
            else re.compile(r"(?!)")
        )
        """finds added tokens, the longest first"""
        self._left = frozenset(name for name, (_, t) in added.items() if t.lstrip)
        self._right = frozenset(name for name, (_, t) in added.items() if t.rstrip)
        self._sections = not any(t.normalized for _, t in added.values())
        """added tokens are found in the text as it stands, so that sections add up to the tokenizer's own encoding"""
        self._check()

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a model folder or a hub id.

        Raises:
            TemplateError: no tokenizer there, or none that the fast `tokenizers` library can run.
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
        return cls(
            hf.backend_tokenizer, chat_template=template, special={k: str(v) for k, v in hf.special_tokens_map.items()}
        )

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        config: dict[str, Any] = {}
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            if (folder / "tokenizer_config.json").exists():
                config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except Exception as e:  # tokenizers raises nothing narrower
            raise TemplateError(f"{folder}: its tokenizer cannot be read: {e}") from e
        template = config.get("chat_template")
        if isinstance(template, list):  # named templates
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        if (folder / "chat_template.jinja").exists():  # the newer place; transformers prefers it too
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        special = {
            k: v["content"] if isinstance(v, dict) else v
            for k, v in config.items()
            if k.endswith("_token") and isinstance(v, (str, dict))
        }
        return cls(backend, chat_template=template, special=special)

    @property
    def is_fast(self) -> bool:
        """Content is encoded word by word from a cache, proven to give the tokenizer's own ids."""
        return self._fast is not None

    # -- ids ---------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of a string of scaffold: its added tokens are atomic; nothing is prepended."""
        if self._fast is not None and self._sections:
            return self._encode_sections(whole_text(text), 0)
        ids: list[int] = self.backend.encode(whole_text(text), add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a string of content: no added token in it counts as one."""
        text = whole_text(text)
        ids = self._fast.encode(text) if self._fast is not None else None
        if ids is None:
            ids = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_section(self, text: str, before: str | None, after: str | None) -> list[int]:
        """Ids of plain text between two added tokens of the scaffold (None: the string's end), which may eat spaces next to them."""
        if before in self._right:
            text = text.lstrip()
        if after in self._left:
            text = text.rstrip()
        return self.encode_plain(text) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens shown."""
        if self._fast_decoder is not None:
            return self._fast_decoder.decode(ids)
        text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    # -- shielding ---------------------------------------------------------------------------------------------------

    def shield(self, texts: Iterable[str], spare: Container[str] = ()) -> tuple[list[str], int]:
        """Swap added tokens in contents for private-use characters, except those in `spare`.

        Returns the new texts and the base to unshield with (0: nothing to do).
        """
        originals = list(texts)
        if not any(m.group() not in spare for t in originals for m in self.pattern.finditer(t)):
            return originals, 0
        base = self.free_base(originals)
        return [self.shielded(t, base, spare) for t in originals], base

    def free_base(self, texts: Iterable[str]) -> int:
        """A private-use range that the texts do not use.

        Raises:
            TemplateError: they use all of them.
        """
        n = len(self._names)
        high = {ord(c) for t in texts if not t.isascii() for c in t if c >= "\U000f0000"}
        base = next((b for b in _BASES if not any(b <= c < b + n for c in high)), 0)
        if not base:
            raise TemplateError(
                "content uses every private-use range that could stand in for added tokens; remove those characters from it"
            )
        return base

    def shielded(self, text: str, base: int, spare: Container[str] = ()) -> str:
        """The text with its added tokens swapped for characters from `base` on."""
        return self.pattern.sub(lambda m: m.group() if m.group() in spare else chr(base + self._index[m.group()]), text)

    def encode_shielded(self, text: str, base: int) -> list[int]:
        """Ids of a rendered string whose contents were shielded with `base`."""
        return self._encode_sections(whole_text(text), base) if base else self.encode(text)

    def _encode_sections(self, text: str, base: int) -> list[int]:
        ids: list[int] = []
        at, before = 0, None
        for match in self.pattern.finditer(text):
            token = match.group()
            ids += self.encode_section(self._unshielded(text[at : match.start()], base), before, token)
            ids.append(self.added[token])
            at, before = match.end(), token
        return ids + self.encode_section(self._unshielded(text[at:], base), before, None)

    def _unshielded(self, text: str, base: int) -> str:
        if not base or text.isascii():
            return text
        n = len(self._names)
        return "".join(self._names[ord(c) - base] if base <= ord(c) < base + n else c for c in text)

    def _check(self) -> None:
        """Refuse a tokenizer whose plain encoding yields added tokens, or whose sections do not add up to its own encoding."""
        ids = set(self.added.values())
        for name in self.added:
            if ids & set(self.encode_plain(f"x {name}y")) | ids & set(self.encode_plain(name)):
                raise TemplateError(
                    f"the tokenizer reads {name!r} as one token even as plain text; tool output could inject it"
                )
        sample = "".join(f"{name}word\n{name} two  " for name in self._names[:64])
        if self.backend.encode(sample, add_special_tokens=False).ids != self.encode_shielded(sample, _BASES[0]):
            raise TemplateError(
                "the tokenizer encodes text next to special tokens differently from text alone; it cannot keep content apart from scaffold"
            )


def whole_text(text: str) -> str:
    """Text that has a UTF-8 form: lone surrogates become U+FFFD."""
    return text if text.isascii() or not _LONE.search(text) else _LONE.sub("\ufffd", text)


def _matcher(token: tokenizers.AddedToken) -> str:
    name = re.escape(token.content)
    return rf"(?<!\w){name}(?!\w)" if token.single_word else name


def _without_added(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, knowing no added tokens, and treating every text as one that goes on from another."""
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
            plain.pre_tokenizer = changed
            changed.__setstate__(json.dumps(state).encode())
            plain.pre_tokenizer = changed
    if backend.decoder is not None:
        plain.decoder = backend.decoder
    return plain
