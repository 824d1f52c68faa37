"""Decoding by the bytes of each token, where the tokenizer's decoder is ByteLevel: it joins the bytes of the tokens, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from agentrl.render.accelerators.word_cache import byte_letters, part_state


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, filled as tokens are first decoded. An id without a token has none, and is left out as the tokenizer does."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._token_of = backend.id_to_token
        self._bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}

    @classmethod
    def build(cls, backend: tokenizers.Tokenizer) -> TokenBytes | None:
        """The table for a tokenizer, or None if its decoder does more than join bytes."""
        decoder = backend.decoder
        return cls(backend) if decoder is not None and part_state(decoder).get("type") == "ByteLevel" else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return b"".join(map(self.__getitem__, ids)).decode("utf-8", "replace")

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        in_letters = all(letter in self._bytes_of for letter in token)  # an added token may be plain text
        found = self[token_id] = bytes(map(self._bytes_of.__getitem__, token)) if in_letters else token.encode()
        return found
