"""A tokenizer that keeps scaffold and content apart.

The law (design §5.3): ids = the tokenisation of the whole string in which only the scaffold's occurrences of added tokens are
atomic; an added token that occurs inside content is plain text. Where content holds none, the ids are the tokenizer's own.

Content is *shielded* before it is put into a template: each added token in it is swapped for one private-use character, which no
template touches. Every added token left in the rendered string is then the scaffold's; the text between them is unshielded and
encoded by a copy of the tokenizer that knows no added tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from agentrl.errors import TemplateError

_BASES = (0xF0000, 0x100000, 0xF8000, 0x108000)
"""where private-use stand-ins may start; one whose range the content does not use is taken"""


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`: encode scaffold atomically and content plainly, decode ids exactly."""

    def __init__(self, backend: tokenizers.Tokenizer, *, chat_template: str | None = None, special: dict[str, str] | None = None) -> None:
        """`special` holds the named special tokens (bos_token, eos_token, …) that templates refer to."""
        self.backend = backend
        self.chat_template = chat_template
        self.special = special or {}
        raw = json.loads(backend.to_str())
        added = raw.get("added_tokens", [])
        self.added: dict[str, int] = {t["content"]: t["id"] for t in added}
        """every added token, special or not"""
        self._plain = tokenizers.Tokenizer.from_str(json.dumps({**raw, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}))
        self._names = list(self.added)
        self._pattern = re.compile("|".join(re.escape(n) for n in sorted(self._names, key=len, reverse=True))) if added else None
        self._strip = {t["content"]: (t.get("lstrip", False), t.get("rstrip", False)) for t in added}
        backend.no_truncation()
        backend.no_padding()
        self._check_plain()

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
            raise TemplateError(f"{path}: its tokenizer ({type(hf).__name__}) has no fast version; convert it to a tokenizer.json first")
        template = hf.chat_template if isinstance(hf.chat_template, str) else None
        return cls(hf.backend_tokenizer, chat_template=template, special={k: str(v) for k, v in hf.special_tokens_map.items()})

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        config: dict[str, Any] = {}
        if (folder / "tokenizer_config.json").exists():
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = config.get("chat_template")
        if isinstance(template, list):  # named templates
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        if template is None and (folder / "chat_template.jinja").exists():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        special = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token") and v}
        return cls(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), chat_template=template, special=special)

    def encode(self, text: str) -> list[int]:
        """Ids of a string of scaffold: its added tokens are atomic; nothing is prepended."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a string of content: no added token in it counts as one."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens shown."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def shield(self, texts: Iterable[str]) -> tuple[list[str], int]:
        """Swap added tokens in contents for private-use characters. Returns the new texts and the base to unshield with (0: nothing to do)."""
        originals = list(texts)
        if self._pattern is None or not any(self._pattern.search(t) for t in originals):
            return originals, 0
        n = len(self._names)
        base = next((b for b in _BASES if not any(b <= ord(c) < b + n for t in originals for c in t if ord(c) >= _BASES[0])), 0)
        if not base:
            raise TemplateError("content uses every private-use range that could stand in for added tokens; remove those characters from it")
        index = {name: chr(base + i) for i, name in enumerate(self._names)}
        return [self._pattern.sub(lambda m: index[m.group()], t) for t in originals], base

    def encode_shielded(self, text: str, base: int) -> list[int]:
        """Ids of a rendered string whose contents were shielded with `base`."""
        if not base or self._pattern is None:
            return self.encode(text)
        ids: list[int] = []
        at = 0
        for match in self._pattern.finditer(text):
            ids += self._encode_between(text[at : match.start()], base)
            ids.append(self.added[match.group()])
            at = match.end()
        return ids + self._encode_between(text[at:], base)

    def _encode_between(self, text: str, base: int) -> list[int]:
        if not text:
            return []
        n = len(self._names)
        return self.encode_plain("".join(self._names[ord(c) - base] if base <= ord(c) < base + n else c for c in text))

    def _check_plain(self) -> None:
        """Refuse a tokenizer whose plain encoding still yields added tokens, or whose added tokens eat neighbouring spaces."""
        for name, token_id in self.added.items():
            if token_id in self.encode_plain(name):
                raise TemplateError(f"the tokenizer reads {name!r} as one token even as plain text; tool output could inject it")
