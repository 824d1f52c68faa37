"""The generations that a function requests with `post`, as SGLang's `/generate` answers them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from agentrl.core.seeds import derive_seed
from agentrl.core.sequences import ids_checksum
from agentrl.engine.base import Generation, Generator, SamplingParams, check_generation
from agentrl.errors import ContractError, EngineAbort, EngineFailure, boundary
from agentrl.render import Renderer
from agentrl.types import FinishReason

ENGINE_HOST, ENGINE_PORT = "agentrl-engine", 30000
"""`args.sglang_router_ip` and `args.sglang_router_port`: requests to this address reach the engine of the run"""
_DISTRIBUTION = ("temperature", "top_p", "top_k")
"""sampling parameters that decide the distribution, which the trainer must know"""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its generation."""

    context: tuple[int, ...]
    generation: Generation
    context_text: str
    text: str
    """of the generation, as it was returned"""
    seed: int
    crc: int
    """checksum of the ids that the engine was sent"""
    seconds: float


@dataclass(kw_only=True)
class Generations:
    """Answers the requests of one episode, or of one rollout function, and keeps them."""

    engine: Generator
    renderer: Renderer
    sampling: SamplingParams
    """the run's; `max_new_tokens`, `stop` and the seed are set by each request"""
    seeds: tuple[Any, ...]
    """what the seed of each generation follows from, besides its context and its number"""
    session: str
    context_length: int
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """ids of rendered prompts by their text"""
    exchanges: list[Exchange] = field(default_factory=list)

    async def answer(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Generate as the payload of `/generate` asks.

        Raises:
            ContractError: the payload asks for what is not supported, or for another distribution than the run's.
            EngineFailure, EngineAbort: the engine did not answer, or was interrupted.
        """
        if payload.get("image_data"):
            raise ContractError("post: image_data is not supported; write an Env (--env) for prompts with images")
        context, text = self._context(payload)
        given = dict(payload.get("sampling_params") or {})
        self._check_distribution(given)
        room = min(int(given.get("max_new_tokens") or 128), self.context_length - len(context))
        if room <= 0:
            return self._response(_EMPTY, "", len(context))
        crc, repeated = ids_checksum(context), sum(e.context == context for e in self.exchanges)
        seed = derive_seed(*self.seeds, "policy", len(context), crc, repeated)
        started = time.perf_counter()
        with boundary(EngineFailure, "engine"):
            sampling = self._sampling(given, room, seed)
            generation = check_generation(
                await self.engine.generate(context, sampling, session=self.session, images=()), room
            )
        if generation.finish_reason is FinishReason.ABORT:
            raise EngineAbort("the engine aborted the generation", "engine abort")
        answer = self._text(generation, trim=not given.get("no_stop_trim", False))
        sent = crc if generation.context_crc is None else generation.context_crc
        seconds = time.perf_counter() - started
        self.exchanges.append(Exchange(context, generation, text, answer, seed, sent, seconds))
        return self._response(generation, answer, len(context))

    def _context(self, payload: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
        """The ids and the text of a request. What was sampled or rendered before is not tokenised again."""
        decode = self.renderer.tokenizer.decode
        if payload.get("input_ids") is not None:
            ids = tuple(int(i) for i in payload["input_ids"])
            return ids, decode(ids)
        text = payload.get("text")
        if not isinstance(text, str):
            raise ContractError(f"post: the payload needs 'text' or 'input_ids', found the keys {sorted(payload)}")
        known = self._longest_known(text)
        return (*known[0], *self.renderer.tokenizer.encode(text[known[1] :])), text

    def _longest_known(self, text: str) -> tuple[tuple[int, ...], int]:
        """The ids of the longest beginning of `text` that is a prompt, or a context with all or a part of its generation; and its length."""
        best: tuple[tuple[int, ...], int] = ((), 0)
        for prompt, ids in self.prompts.items():
            if text.startswith(prompt):
                best = max(best, (ids, len(prompt)), key=lambda known: known[1])
        for e in self.exchanges:
            if not text.startswith(e.context_text):
                continue
            rest, ids = text[len(e.context_text) :], e.generation.ids
            if rest.startswith(e.text):
                best = max(best, ((*e.context, *ids), len(e.context_text) + len(e.text)), key=lambda known: known[1])
                continue
            for kept in range(len(ids) - 1, 0, -1):
                part = self.renderer.tokenizer.decode(ids[:kept])
                if rest.startswith(part):
                    known = ((*e.context, *ids[:kept]), len(e.context_text) + len(part))
                    best = max(best, known, key=lambda known: known[1])
                    break
        return best

    def _check_distribution(self, given: Mapping[str, Any]) -> None:
        for name in _DISTRIBUTION:
            run = getattr(self.sampling, name)
            if name in given and given[name] != run:
                raise ContractError(
                    f"post: sampling_params has {name} {given[name]}, the run samples with {run}; leave it as it was given"
                )

    def _sampling(self, given: Mapping[str, Any], room: int, seed: int) -> SamplingParams:
        stop = given.get("stop") or ()
        stop_ids = (*self.renderer.stop_token_ids, *(given.get("stop_token_ids") or ()))
        s = self.sampling
        return SamplingParams(
            max_new_tokens=room,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=stop_ids,
            ignore_eos=bool(given.get("ignore_eos", False)),
            seed=seed,
        )

    def _text(self, generation: Generation, *, trim: bool) -> str:
        """The text of a generation; `trim`: without the stop token or stop string that ended it."""
        ids: Sequence[int] = generation.ids
        if trim and generation.finish_reason is FinishReason.STOP and ids and ids[-1] in self.renderer.stop_token_ids:
            ids = ids[:-1]
        text = self.renderer.tokenizer.decode(ids)
        if trim and isinstance(generation.matched_stop, str):
            text = text.partition(generation.matched_stop)[0]
        return text

    def _response(self, generation: Generation, text: str, prompt_tokens: int) -> dict[str, Any]:
        matched = {} if generation.matched_stop is None else {"matched": generation.matched_stop}
        pairs = zip(generation.log_probs, generation.ids, strict=not generation.demonstration)
        return {
            "text": text,
            "output_ids": list(generation.ids),
            "meta_info": {
                "id": self.session,
                "finish_reason": {"type": generation.finish_reason.value, **matched},
                "output_token_logprobs": [[log_prob, token, None] for log_prob, token in pairs],
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(generation.ids),
                "cached_tokens": generation.cached_tokens,
                "weight_version": str(generation.policy_version),
            },
        }


_EMPTY = Generation((), (), FinishReason.LENGTH)

current: ContextVar[Generations] = ContextVar("generations of a function written for slime")
"""the episode, or the rollout function, that is running"""
