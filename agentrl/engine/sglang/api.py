"""One SGLang server over its native HTTP API: what it is, and the commands that need no thought of the requests that it has.

`sglang.SGLangEngine` adds the requests, and what must be thought of while there are some.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.engine.base import EngineInfo
from agentrl.engine.sglang.http import HttpClient
from agentrl.engine.sglang.protocol import ServerFacts, read_version
from agentrl.errors import EngineFailure, boundary

QUICK_S = 10.0
"""of a question about the server's state"""
START_S = 30.0
"""of the question what the server is"""


class SGLangServer:
    """A server at an HTTP address; see `SGLangEngine` for the arguments."""

    def __init__(
        self, address: str, model_dir: Path | None, context_length: int | None, policy_version: int, timeout_s: float
    ) -> None:
        self.address = address.rstrip("/")
        self.http = HttpClient(address)
        self.policy_version = policy_version
        config = _config(model_dir)
        self.vocab_size: int | None = config.get("vocab_size")
        """ids are below it; None: not known"""
        self._positions: int | None = config.get("max_position_embeddings")
        self.started = 0
        """how often `start` found a server: what was agreed with an earlier one is gone"""
        self._first_version = policy_version
        self._model_dir = model_dir
        self._context_length = context_length
        self._timeout_s = timeout_s
        self._facts: ServerFacts | None = None
        self._asleep = False
        self._closed = False

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> ServerFacts:
        """What the server said of itself at the start.

        Raises:
            EngineFailure: not started, or closed.
        """
        if self._closed:
            raise EngineFailure(f"the engine at {self.address} is closed", "engine closed")
        if self._facts is None:
            raise EngineFailure(
                f"the engine at {self.address} was not started; await start() first", "engine not started"
            )
        return self._facts

    @property
    def checksum_kind(self) -> str:
        """What `checksums` gives; empty: nothing."""
        return self._facts.checksums if self._facts is not None else ""

    @property
    def context_length(self) -> int:
        """Most tokens of context and generation together."""
        known = [n for n in (self._context_length, self.facts.context_length, self._positions) if n]
        if not known:
            raise EngineFailure(
                f"the server at {self.address} does not say its context length; give context_length",
                "no context length",
            )
        return min(known)

    async def start(self) -> None:
        """Ask the server what it is; a second call asks again (after a restart). An engine that is paused stays so.

        Raises:
            EngineFailure: it does not say.
        """
        info = await self.http.get("/server_info", timeout_s=min(START_S, self._timeout_s))
        try:
            paths = (await self.http.get("/openapi.json", timeout_s=QUICK_S)).get("paths", {})
        except EngineFailure:
            paths = {}
        self._facts = ServerFacts.read(info, paths)
        self._asleep = False
        self.started += 1

    async def health(self) -> EngineInfo:
        """What it is; EngineFailure if it does not answer within seconds."""
        facts = self.facts
        info = await self.http.get("/model_info", timeout_s=QUICK_S)
        return EngineInfo(
            name="sglang",
            version=facts.version,
            policy_version=read_version(info.get("weight_version"), self._first_version),
            context_length=self.context_length,
            deterministic=facts.deterministic,
        )

    # -- commands ----------------------------------------------------------------------------------------------------

    async def _call(self, path: str, body: dict[str, Any]) -> Any:
        """A command that must succeed."""
        _ = self.facts
        answer = await self.http.post(path, body, timeout_s=self._timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineFailure(f"{self.address}{path}: {answer.get('message')}", f"engine: {path.strip('/')} refused")
        return answer

    async def flush(self) -> None:
        """Drop the prefix cache; for a moment after the last answer the server may still count it as running."""
        for wait_s in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0):
            if await self._idle():
                return
            await asyncio.sleep(wait_s)
        await self._call("/flush_cache", {})

    async def _idle(self) -> bool:
        try:
            await self._call("/flush_cache", {})
        except EngineFailure as e:
            if "HTTP 4" not in e.cause:
                raise
            return False
        return True

    # -- what its weights say ----------------------------------------------------------------------------------------

    async def score(self, ids: Sequence[int], *, timeout_s: float | None = None) -> list[float]:
        """Log-probs of ids[1:] by the weights that the server has now, also while it is paused for everybody else."""
        await self._call("/continue_generation", {})
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self.http.post("/generate", body, timeout_s=timeout_s or self._timeout_s)
        with boundary(EngineFailure, "engine: log-probs of a prompt"):
            return [float(p[0]) for p in answer["meta_info"]["input_token_logprobs"][1:]]

    async def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The likeliest continuation by the weights that the server has now, whatever their version."""
        params = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": list(ids), "sampling_params": params}
        answer = await self.http.post("/generate", body, timeout_s=self._timeout_s)
        with boundary(EngineFailure, "engine: greedy generation"):
            return [int(i) for i in answer["output_ids"]]

    async def checksums(self) -> dict[str, str] | None:
        """A checksum of every parameter by the server's own names; None where the server gives none that can be compared."""
        if not self.facts.checksums:
            return None
        answer = await self._call("/weights_checker", {"action": "checksum"})
        ranks = answer.get("ranks") or [{}]
        found = ranks[0].get("checksums")
        return dict(found) if found else None


def _config(model_dir: Path | None) -> dict[str, Any]:
    if model_dir is None or not (model_dir / "config.json").exists():
        return {}
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text
