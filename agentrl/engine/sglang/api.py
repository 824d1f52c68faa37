"""The HTTP API of one SGLang server. It knows nothing of requests in flight: `engine.SGLangEngine` does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from agentrl.engine.sglang.http import HttpClient
from agentrl.engine.sglang.protocol import ServerFacts, check_version, malformed
from agentrl.errors import EngineFailure, boundary

QUICK_S = 10.0
"""limit of requests about the server's state"""
CONNECT_S = 30.0
"""limit of the request for the server's properties"""
HEALTH_GENERATE_S = 30.0
"""limit of the request that makes the server generate; the server itself gives up after 20 s"""


class ServerApi:
    """Commands and queries of the server at `address`.

    Args:
        address: http://host:port.
        timeout_s: limit of a command.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address.rstrip("/")
        self.timeout_s = timeout_s
        self._http = HttpClient(address)
        self._facts: ServerFacts | None = None
        self._closed = False

    @property
    def facts(self) -> ServerFacts:
        """The server's properties, as of the last `connect`.

        Raises:
            EngineFailure: not connected, or closed.
        """
        if self._closed:
            raise EngineFailure(f"the engine at {self.address} is closed", "engine closed")
        if self._facts is None:
            raise EngineFailure(
                f"the engine at {self.address} was not started; await start() first", "engine not started"
            )
        return self._facts

    async def connect(self) -> None:
        """Read the server's properties.

        Raises:
            EngineFailure: no answer, or a malformed one.
            ConfigError: its version is too old.
        """
        info = await self._http.get("/server_info", timeout_s=min(CONNECT_S, self.timeout_s))
        try:
            described = await self._http.get("/openapi.json", timeout_s=QUICK_S)
        except EngineFailure:
            described = {"paths": {}}
        paths = described.get("paths") if isinstance(described, dict) else None
        if not isinstance(info, dict):
            raise malformed(f"{self.address}/server_info", f"expected an object, found {type(info).__name__}")
        if not isinstance(paths, dict):
            raise malformed(f"{self.address}/openapi.json", "expected an object with paths")
        try:
            self._facts = ServerFacts.read(info, paths)
        except ValueError as e:
            raise malformed(f"{self.address}/server_info", e) from e
        check_version(self._facts.version, f"the server at {self.address}", "update it")

    async def close(self) -> None:
        """Close the connections. The server continues. Idempotent."""
        self._closed = True
        await self._http.close()

    async def command(self, path: str, body: dict[str, Any]) -> Any:
        """Send a command; returns the response.

        Raises:
            EngineFailure: no response, or the server refused the command.
        """
        _ = self.facts
        response = await self._http.post(path, body, timeout_s=self.timeout_s)
        if isinstance(response, dict) and response.get("success") is False:
            raise EngineFailure(
                f"{self.address}{path}: {response.get('message')}", f"engine: {path.strip('/')} refused"
            )
        return response

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(self, body: dict[str, Any], *, timeout_s: float) -> Coroutine[Any, Any, Any]:
        """The response of /generate."""
        return self._http.post("/generate", body, timeout_s=timeout_s)

    async def abort(self, request_id: str) -> None:
        """Abort a request. Failures are ignored: a server that is gone has dropped the request too."""
        try:
            await self._http.post("/abort_request", {"rid": request_id}, timeout_s=QUICK_S)
        except EngineFailure:
            return

    async def health_generate(self) -> None:
        """Make the server prove that it generates; a busy server need not do more than it does.

        Raises:
            EngineFailure: it does not generate.
        """
        await self._http.get("/health_generate", timeout_s=HEALTH_GENERATE_S)

    async def flush_cache(self) -> None:
        """Drop the prefix cache. For a moment after the last response the server may still count its request as running."""
        for wait_s in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0):
            if await self.try_flush_cache():
                return
            await asyncio.sleep(wait_s)
        await self.command("/flush_cache", {})

    async def try_flush_cache(self) -> bool:
        """Drop the prefix cache; False if the server refuses because it is not idle."""
        try:
            await self.command("/flush_cache", {})
        except EngineFailure as e:
            if "HTTP 4" not in e.cause:
                raise
            return False
        return True

    # -- weights -------------------------------------------------------------------------------------------------------

    async def weight_version(self) -> str:
        """The server's name of its weights."""
        info = await self._http.get("/model_info", timeout_s=QUICK_S)
        version = info.get("weight_version") if isinstance(info, dict) else None
        if type(version) not in (str, int):
            raise malformed(f"{self.address}/model_info", f"weight_version {version!r:.60}; expected a text")
        return str(version)

    async def score(
        self, ids: Sequence[int], *, adapter: str | None = None, timeout_s: float | None = None
    ) -> list[float]:
        """Log-probs of ids[1:] by the current weights, with an adapter by the server's name of it. Ends a pause of the server."""
        await self.command("/continue_generation", {})
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({} if adapter is None else {"lora_path": adapter}),
        }
        response = await self.generate(body, timeout_s=timeout_s or self.timeout_s)
        with boundary(EngineFailure, "engine: log-probs of a prompt"):
            log_probs = [float(triple[0]) for triple in response["meta_info"]["input_token_logprobs"][1:]]
        if len(log_probs) != len(ids) - 1:
            raise malformed(f"{self.address}/generate", f"{len(log_probs)} log-probs of {len(ids) - 1} prompt tokens")
        return log_probs

    async def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` most likely next ids by the current weights, whatever their version."""
        params = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
        response = await self.generate({"input_ids": list(ids), "sampling_params": params}, timeout_s=self.timeout_s)
        with boundary(EngineFailure, "engine: greedy generation"):
            sampled = [int(i) for i in response["output_ids"]]
        if len(sampled) != count:
            raise malformed(f"{self.address}/generate", f"{len(sampled)} output_ids; requested {count}")
        return sampled

    @property
    def checksum_kind(self) -> tuple[str, int]:
        """The kind of `checksums`, empty if the server has none that can be compared, or is not connected; and the tensor-parallel size."""
        return ("", 1) if self._facts is None else (self._facts.checksums, self._facts.tp_size)

    async def checksums(self) -> dict[str, str] | None:
        """A checksum of every parameter by the server's name of it, of several ranks with the rank; None if the server has none that can be compared.

        Raises:
            EngineFailure: the answer is malformed, or does not have every rank once.
        """
        if not self.facts.checksums:
            return None
        response = await self.command("/weights_checker", {"action": "checksum"})
        size = self.facts.tp_size
        with boundary(EngineFailure, "engine: checksums"):
            ranks = response.get("ranks") or [{}]
            if size == 1:
                checksums = ranks[0].get("checksums")
                return dict(checksums) if checksums else None
            by_rank = {_tensor_rank(rank["parallelism_info"]): rank["checksums"] for rank in ranks}
        if sorted(by_rank) != list(range(size)) or len(ranks) != size:
            raise malformed(
                f"{self.address}/weights_checker", f"checksums of the ranks {sorted(by_rank)}, expected {size}"
            )
        return {f"rank {rank}: {name}": value for rank, sums in by_rank.items() for name, value in sums.items()}


def _tensor_rank(place: Any) -> int:
    """The tensor-parallel rank in a `parallelism_info` of /weights_checker: since 0.5.23 a list with an entry for each model of the rank."""
    return int((place[0] if isinstance(place, list) else place)["tp_rank"])
