"""The local engine behind SGLang's HTTP API, for runs with genuine weights and servers where no SGLang is installed.

    agentrl train --engine sglang --engine-python PROGRAM --weight-sync disk …

PROGRAM is executable and passes its arguments to this file (see chaos.py), which is both a stand-in for SGLang's interpreter, as agentrl asks it for
its version and starts `-m sglang.launch_server`, and that server. Generations follow from the request alone (weights, context, `sampling_seed`), at
any load. Log-probs of a prompt are returned where a weight sync asks for them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = "0.5.23"
"""whose API this is"""


def main() -> None:
    """Answer what is asked of SGLang's interpreter, or serve."""
    if sys.argv[1] == "-c":
        print(VERSION)
        return
    if sys.argv[1:3] != ["-m", "sglang.launch_server"]:
        raise SystemExit(f"usage: {sys.argv[0]} -m sglang.launch_server --model-path PATH --port N [--host HOST]")
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int)
    known, _ = parser.parse_known_args(sys.argv[3:])
    asyncio.run(serve(known.model_path, known.host, known.port, known.context_length))


async def serve(model: Path, host: str, port: int, context_length: int | None = None) -> None:
    """Serve until the process ends."""
    from aiohttp import web

    server = LocalServer(model, context_length)
    await server.engine.start()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    await asyncio.Event().wait()


class LocalServer:
    """The paths of SGLang's API that agentrl calls. A handler takes the body and returns the status and the answer."""

    def __init__(self, model: Path, context_length: int | None) -> None:
        from agentrl.engine.local.engine import LocalEngine
        from agentrl.render import Tokenizer

        decode = Tokenizer.load(model).decode
        self.engine = LocalEngine(model, decode=decode, context_length=context_length, threads=1)
        self.version = "default"
        self.running = 0
        self.sessions = 0

    async def handle(self, request: Any) -> Any:
        """Answer a request."""
        from aiohttp import web

        handler = getattr(self, f"on{request.path.replace('/', '_')}", None)
        if handler is None:
            return web.Response(status=404, text="no such path")
        status, answer = await handler(await request.json() if request.can_read_body else {})
        return web.json_response(answer, status=status)

    async def on_health(self, _: Any) -> tuple[int, Any]:
        return 200, {}

    async def on_health_generate(self, _: Any) -> tuple[int, Any]:
        await self.engine.health()
        return 200, {}

    async def on_server_info(self, _: Any) -> tuple[int, Any]:
        info = {"version": VERSION, "device": "cpu", "tp_size": 1, "enable_deterministic_inference": True}
        return 200, info | {"context_length": self.engine.context_length}

    async def on_model_info(self, _: Any) -> tuple[int, Any]:
        return 200, {"weight_version": self.version}

    async def on_pause_generation(self, _: Any) -> tuple[int, Any]:
        await self.engine.pause()
        return 200, {}

    async def on_continue_generation(self, _: Any) -> tuple[int, Any]:
        await self.engine.resume()
        return 200, {}

    async def on_abort_request(self, body: Any) -> tuple[int, Any]:
        await self.engine.abort(None if body.get("abort_all") else body["rid"])
        return 200, {}

    async def on_flush_cache(self, _: Any) -> tuple[int, Any]:
        return (400 if self.running else 200), {}

    async def on_update_weights_from_disk(self, body: Any) -> tuple[int, Any]:
        from agentrl.core.weights_fingerprint import fingerprint
        from agentrl.engine.base import WeightsManifest
        from agentrl.errors import EngineFailure, StoreError

        folder = Path(body["model_path"])
        try:
            manifest = WeightsManifest(folder, await asyncio.to_thread(fingerprint, folder))
            await self.engine.update_weights(manifest, int(body["weight_version"]))
        except (OSError, StoreError, EngineFailure) as e:
            return 200, {"success": False, "message": str(e)}
        self.version = str(body["weight_version"])
        return 200, {"success": True}

    async def on_generate(self, body: Any) -> tuple[int, Any]:
        from agentrl.errors import EngineAbort, EngineFailure

        ids, self.sessions = body["input_ids"], self.sessions + 1
        session = body.get("rid", f"without an id {self.sessions}")
        meta: dict[str, Any] = {"prompt_tokens": len(ids), "weight_version": self.version, "cached_tokens": 0}
        self.running += 1
        try:
            if "logprob_start_len" in body:
                scores = await self.engine._call(lambda scheduler: log_probs(scheduler.model, ids))
                pairs = zip([None, *scores], ids, strict=True)
                meta["input_token_logprobs"] = [[score, token, None] for score, token in pairs]
            generation = await self.engine.generate(ids, sampling_of(body["sampling_params"]), session=session)
            await self.engine.release(session)
        except EngineAbort:
            ended = {"finish_reason": {"type": "abort", "message": "aborted"}, "completion_tokens": 0}
            return 200, {"text": "", "output_ids": [], "meta_info": meta | ended}
        except EngineFailure as e:
            return 400, {"error": {"message": str(e)}}
        finally:
            self.running -= 1
        if generation.policy_version:
            meta["weight_version"] = str(generation.policy_version)
        tokens = zip(generation.log_probs, generation.ids, strict=True)
        meta["finish_reason"] = {"type": generation.finish_reason.value, "matched": generation.matched_stop}
        meta |= {
            "completion_tokens": len(generation.ids),
            "output_token_logprobs": [[score, token, None] for score, token in tokens],
        }
        return 200, {"text": "", "output_ids": list(generation.ids), "meta_info": meta}


def sampling_of(given: Any) -> Any:
    """SGLang's sampling parameters as those of an engine."""
    from agentrl.engine.base import SamplingParams

    names = ("max_new_tokens", "temperature", "top_p", "top_k", "ignore_eos")
    return SamplingParams(
        **{name: given[name] for name in names if name in given},
        stop=tuple(given.get("stop", ())),
        stop_token_ids=tuple(given.get("stop_token_ids", ())),
        seed=given.get("sampling_seed", 0),
    )


def log_probs(model: Any, ids: Sequence[int]) -> list[float]:
    """The log-probs of ids[1:] at temperature 1, by one forward in the engine's thread."""
    import torch

    from agentrl.engine.local.kv_cache import BlockPool, Chunk, Session

    pool, session = BlockPool(model.device), Session("prompt", list(ids), [len(ids)])
    session.allocate(len(ids), pool)
    logits = model.forward([Chunk(session, 0, len(ids))], pool, range(len(ids) - 1))[: len(ids) - 1]
    found = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return [float(x) for x in found]


if __name__ == "__main__":
    main()
