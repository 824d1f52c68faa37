"""A scripted HTTP server with the part of SGLang's native API that the engine uses. It fails on command."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], list[int]]


def count_up(body: dict[str, Any]) -> list[int]:
    """The requested number of ids, counting up from the last id of the context."""
    last = body["input_ids"][-1]
    return [(last + i) % 100 for i in range(1, body["sampling_params"]["max_new_tokens"] + 1)]


@dataclass
class Double:
    """One server. `faults` are taken one per request of /generate: an HTTP status, 'reset' (after the first bytes), 'close' (before any)."""

    version: str = "0.5.23"
    answer: Answer = count_up
    delay_s: float = 0.0
    update_s: float = 0.0
    weight_version: str = "default"
    spans: list[dict[str, Any]] = field(default_factory=list)
    """versions of a generation's tokens, as 0.5.23 reports them"""
    sampled: int = 0
    """tokens that an aborted request has"""
    faults: list[Any] = field(default_factory=list)
    refuse: dict[str, int] = field(default_factory=dict)
    """paths that respond with an error status"""
    calls: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    device: str = "cuda"
    tp_size: int = 1
    ranks: list[dict[str, Any]] | None = None
    """what /weights_checker reports of each rank; None: there is no such path"""
    eos: tuple[int, ...] = ()
    cached: int = 1
    image_tokens: tuple[int, ...] = ()
    """number of tokens that replace the placeholder (id 77) of each image"""
    servers: tuple[str, ...] | None = None
    """addresses of the servers behind it; None: it is not a router"""
    works: bool = True
    """/health_generate succeeds"""
    memory_saver: bool = False
    experts: Callable[[int, int], Any] | None = None
    """(start, stop) -> the int32 experts [tokens, layers, topk] of these tokens, where a request asks for them"""
    lora: bool = False
    """adapters can be loaded"""
    adapters: dict[str, str] = field(default_factory=dict)
    """folders of the adapters that are loaded, by name"""
    adapter_log_prob: Callable[[str], float] = lambda folder: -0.5
    """the log-prob of every token with the adapter of a folder"""
    asleep: set[str] = field(default_factory=set)
    """tags of the released memory"""
    port: int = 0

    def __post_init__(self) -> None:
        self.going = asyncio.Event()
        self.going.set()
        self.aborted = asyncio.Event()
        self.session_open = False
        self.connections = 0
        self.idle = True
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> Double:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            self.going.set()
            await runner.cleanup()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append(path)
        if path in self.refuse:
            return web.Response(status=self.refuse[path], text="refused by the script")
        body = await request.json() if request.can_read_body else {}
        if path == "/openapi.json" and self.ranks is not None:
            return web.json_response({"paths": {"/weights_checker": {}, "/begin_weight_update": {}}})
        handler = getattr(self, path.strip("/"), None)
        if handler is None:
            return web.Response(status=404, text="no such path")
        return await handler(request, body)

    async def health(self, _: Any, __: Any) -> web.Response:
        return web.Response()

    async def health_generate(self, _: Any, __: Any) -> web.Response:
        return web.Response(status=200 if self.works else 503)

    async def server_info(self, _: Any, __: Any) -> web.Response:
        facts = {"version": self.version, "device": self.device, "tp_size": self.tp_size, "context_length": 256}
        flags = {
            "enable_memory_saver": self.memory_saver,
            "enable_return_routed_experts": self.experts is not None,
            "enable_lora": self.lora,
        }
        return web.json_response(facts | flags)

    async def workers(self, _: Any, __: Any) -> web.Response:
        if self.servers is None:
            return web.Response(status=404, text="no such path")
        return web.json_response({"workers": [{"url": a, "worker_type": "regular"} for a in self.servers]})

    async def weights_checker(self, _: Any, __: Any) -> web.Response:
        return web.json_response({"success": True, "ranks": self.ranks})

    async def model_info(self, _: Any, __: Any) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def pause_generation(self, _: Any, body: Any) -> web.Response:
        self.going.clear()
        return web.json_response({})

    async def continue_generation(self, _: Any, __: Any) -> web.Response:
        self.going.set()
        return web.json_response({})

    async def abort_request(self, _: Any, body: Any) -> web.Response:
        self.aborted.set()
        self.aborted = asyncio.Event()
        return web.json_response({})

    async def flush_cache(self, _: Any, __: Any) -> web.Response:
        return web.Response(text="flushed", status=200 if self.idle else 400)

    async def begin_weight_update(self, _: Any, __: Any) -> web.Response:
        if self.version == "0.5.17":
            return web.Response(status=404)
        self.session_open = True
        return web.json_response({"success": True})

    async def end_weight_update(self, _: Any, __: Any) -> web.Response:
        done, self.session_open = self.session_open, False
        return web.json_response({"success": done, "message": "no session"})

    async def update_weight_version(self, _: Any, body: Any) -> web.Response:
        self.weight_version = str(body["new_version"])
        return web.json_response({"success": True})

    async def update_weights_from_disk(self, _: Any, body: Any) -> web.Response:
        await asyncio.sleep(self.update_s)
        self.weight_version = str(body["weight_version"])
        return web.json_response({"success": True})

    async def load_lora_adapter(self, _: Any, body: Any) -> web.Response:
        new = body["lora_name"] not in self.adapters
        self.adapters |= {body["lora_name"]: body["lora_path"]} if new else {}
        return web.json_response({"success": new, "error_message": "already loaded"}, status=200 if new else 400)

    async def unload_lora_adapter(self, _: Any, body: Any) -> web.Response:
        found = self.adapters.pop(body["lora_name"], None) is not None
        return web.json_response({"success": found}, status=200 if found else 400)

    async def release_memory_occupation(self, _: Any, body: Any) -> web.Response:
        self.asleep |= set(body["tags"])
        return web.json_response({})

    async def resume_memory_occupation(self, _: Any, body: Any) -> web.Response:
        awake = set(body["tags"]) - self.asleep
        self.asleep -= set(body["tags"])
        return web.Response(status=500, text=f"{awake} is awake") if awake else web.json_response({})

    async def generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "logprob_start_len" not in body:
            self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return web.Response(status=fault, text="fault by the script")
        if fault == "close":
            request.transport.abort()
            return web.Response()
        if fault == "reset":
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"output_ids": [1,')
            request.transport.abort()
            return response
        return await self._answer(body)

    async def _answer(self, body: dict[str, Any]) -> web.Response:
        version, aborted = self.weight_version, self.aborted
        gone = asyncio.ensure_future(aborted.wait())
        work = asyncio.ensure_future(self._think())
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        finished = work.done()
        gone.cancel()
        work.cancel()
        ids = self.answer(body) if finished else self.answer(body)[: self.sampled]
        params = body["sampling_params"]
        stops = {*params.get("stop_token_ids", ()), *(() if params.get("ignore_eos") else self.eos)}
        at_end = bool(ids) and ids[-1] in stops
        ended = {"type": "stop", "matched": ids[-1]} if at_end else {"type": "length", "length": len(ids)}
        reason = ended if finished else {"type": "abort", "message": "aborted"}
        name = body.get("lora_path")
        if name is not None and name not in self.adapters:  # TokenizerManager: lora_registry.acquire
            return web.json_response({"error": {"message": f"the adapters {name} are not loaded"}}, status=400)
        log_prob = -0.5 if name is None else self.adapter_log_prob(self.adapters[name])
        pairs = [[log_prob, i, None] for i in ids]
        scores = [[None, i, None] if n == 0 else [log_prob, i, None] for n, i in enumerate(body["input_ids"])]
        prompt = self._expanded(body)
        meta = {
            "prompt_tokens": len(prompt),
            "input_token_logprobs": scores,
            "finish_reason": reason,
            "output_token_logprobs": pairs,
            "weight_version": version,
            "cached_tokens": self.cached,
            **({"weight_versions": self.spans} if self.spans else {}),
        }
        if self.experts is not None and body.get("return_routed_experts"):
            # BatchResultProcessor._maybe_collect_routed_experts: [start_len, seqlen - 1)
            chosen = self.experts(body["routed_experts_start_len"], len(prompt) + len(ids) - 1)
            if chosen is not None:
                meta["routed_experts"] = base64.b64encode(chosen.tobytes()).decode()
        told = {"prompt_token_ids": prompt} if body.get("return_prompt_token_ids") else {}
        return web.json_response(
            {"text": "", "output_ids": ids, "meta_info": {**meta, "completion_tokens": len(ids)}, **told}
        )

    def _expanded(self, body: dict[str, Any]) -> list[int]:
        """As BaseMultimodalProcessor._expand_input_ids of SGLang 0.5.17 and 0.5.23."""
        counts = iter(self.image_tokens)
        ids = body["input_ids"]
        if "image_data" not in body:
            return list(ids)
        assert ids.count(77) == len(body["image_data"]) == len(self.image_tokens)
        return [j for i in ids for j in ([77] * next(counts) if i == 77 else [i])]

    async def _think(self) -> None:
        await asyncio.sleep(self.delay_s)
        await self.going.wait()
