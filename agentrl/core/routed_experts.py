"""The experts to which the routers of a mixture of experts sent each token: recorded with a generation, and used again by the trainer.

    experts[t, l, k]: the k-th expert of layer l for token t; in a layer without experts nothing is read

A token has experts only once it was an input of the model, so the last token of a generation has none until the next one.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.plain_files import read_plain_file
from agentrl.errors import StoreError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """What a model's routers choose from."""

    layers: int
    """layers of the model, with those that have no experts"""
    experts: int
    """experts of a layer that has some"""
    topk: int
    """experts of a token"""
    mixtures: tuple[int, ...]
    """the layers that have experts, from 0"""

    def fault(self, experts: NDArray[Any]) -> str | None:
        """What is wrong with experts `[tokens, layers, topk]`; None: nothing."""
        import numpy as np

        expected = (self.layers, self.topk)
        if experts.ndim != 3 or experts.shape[1:] != expected:
            return f"they have shape {experts.shape}, expected (tokens, {self.layers} layers, {self.topk} experts)"
        chosen = experts[:, self.mixtures, :]
        if not chosen.size:
            return None
        if chosen.min() < 0 or chosen.max() >= self.experts:
            return f"they go from {chosen.min()} to {chosen.max()}, expected 0 to {self.experts - 1}"
        ordered = np.sort(chosen, axis=-1)
        repeated = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(-1))
        if len(repeated):
            token, number = repeated[0]
            layer = self.mixtures[number]
            return f"token {token} has the experts {experts[token, layer].tolist()} in layer {layer}, one of them twice"
        return None


class RoutedExperts:
    """The experts of consecutive tokens, as they are recorded. Two are equal if all their experts are."""

    def __init__(self, shape: tuple[int, int, int], dtype: str, source: bytes | Path | None, sha256: str = "") -> None:
        """`shape`: tokens, layers, experts of a token; `dtype`: of one number; `source`: the numbers, or their compressed file, or None where
        only the hash is known; `sha256`: of the numbers, computed if it is empty.
        """
        if isinstance(source, bytes) and len(source) != math.prod(shape) * int(dtype[-1]):
            raise ValueError(f"{len(source)} bytes of routed experts do not have the shape {shape} of {dtype}")
        self.shape, self.dtype, self._source = shape, dtype, source
        if sha256:
            self.__dict__["sha256"] = sha256

    @classmethod
    def of(cls, experts: NDArray[Any]) -> RoutedExperts:
        """Of an array [tokens, layers, topk] of numbers from 0 to 65,535."""
        import numpy as np

        small = not experts.size or experts.max() < 256
        values = np.ascontiguousarray(experts, "u1" if small else "<u2")
        tokens, layers, topk = values.shape
        return cls((tokens, layers, topk), values.dtype.str, values.tobytes())

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.shape[0]

    @cached_property
    def sha256(self) -> str:
        """Hash of the numbers."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def content(self) -> bytes:
        """The numbers as bytes.

        Raises:
            StoreError: their file cannot be read, or holds others.
        """
        if isinstance(self._source, bytes):
            return self._source
        import zstandard

        file, size = self._source or Path(f"{self.sha256}.zst"), math.prod(self.shape) * int(self.dtype[-1])
        try:
            frame = read_plain_file(file)
            # the size is compared before anything is decompressed: a small file can hold gigabytes
            fits = zstandard.frame_content_size(frame) == size
            content = zstandard.ZstdDecompressor().decompress(frame) if fits else b""
        except (OSError, zstandard.ZstdError) as e:
            raise StoreError(f"the routed experts {self.sha256[:12]}… of an episode cannot be read: {e}") from e
        if len(content) != size or hashlib.sha256(content).hexdigest() != self.sha256:
            raise StoreError(
                f"{file}: these are not the routed experts that the episode refers to; is the file damaged?"
            )
        return content

    def array(self) -> NDArray[Any]:
        """[tokens, layers, topk], read-only."""
        import numpy as np

        return np.frombuffer(self.content, self.dtype).reshape(self.shape)

    def __getitem__(self, tokens: slice) -> RoutedExperts:
        """Those of a range of the tokens."""
        return RoutedExperts.of(self.array()[tokens])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        return self.shape == other.shape and self.dtype == other.dtype and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        return f"RoutedExperts({self.tokens} tokens, {self.shape[1]} layers, {self.shape[2]} experts each)"


def joined(parts: list[RoutedExperts]) -> RoutedExperts | None:
    """The experts of tokens that follow one another; None: there are no parts."""
    import numpy as np

    if not parts:
        return None
    return parts[0] if len(parts) == 1 else RoutedExperts.of(np.concatenate([part.array() for part in parts]))
