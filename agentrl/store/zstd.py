"""Decompression with a bound: 131 kB of zstd can hold 8 GB."""

from __future__ import annotations

import zstandard

from agentrl.errors import StoreError

MAX_RATIO = 200
"""How much larger a frame may become than it is; records, which are mostly digits, become 5 to 20 times larger."""
ALWAYS_ALLOWED = 256 << 20
"""Bytes that any frame may become."""
_SLICE = 1 << 12
"""Compressed bytes decompressed at a time; they become 128 MiB at most."""


class FrameReader:
    """Decompresses one frame that arrives in pieces."""

    def __init__(self, where: object) -> None:
        """`where` names the frame in errors."""
        self.where = where
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._parts: list[bytes] = []
        self._consumed = self._size = 0

    @property
    def complete(self) -> bool:
        """Whether the end of the frame was reached."""
        return bool(self._frame.eof)

    def feed(self, data: memoryview) -> int:
        """Decompress; return how many bytes of `data` belong to the frame.

        Raises:
            StoreError: the frame is damaged, or becomes too large.
        """
        at = 0
        while at < len(data) and not self._frame.eof:
            piece = data[at : at + _SLICE]
            try:
                self._parts.append(self._frame.decompress(piece))
            except zstandard.ZstdError as e:
                raise StoreError(f"{self.where} is damaged: {e}") from e
            used = len(piece) - len(self._frame.unused_data)
            at, self._consumed, self._size = at + used, self._consumed + used, self._size + len(self._parts[-1])
            if self._size > max(ALWAYS_ALLOWED, MAX_RATIO * self._consumed):
                raise StoreError(
                    f"{self.where} becomes more than {MAX_RATIO} times larger when it is decompressed, and more than "
                    f"{ALWAYS_ALLOWED >> 20} MiB; agentrl writes no such file, so it is not read"
                )
        return at

    def content(self) -> bytes:
        """Return what was decompressed so far."""
        return b"".join(self._parts)


def decompress(data: bytes, where: object) -> bytes:
    """Return the contents of one frame.

    Raises:
        StoreError: it is damaged, incomplete, or becomes too large.
    """
    frame = FrameReader(where)
    frame.feed(memoryview(data))
    if not frame.complete:
        raise StoreError(f"{where} is damaged: it ends early")
    return frame.content()
