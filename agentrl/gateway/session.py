"""One episode at the gateway: requests become turns of its record, under the limits of the run.

A request is planned when it arrives: which generation it continues, and the ids of its context. What was sampled before is kept verbatim. The
renderer proves the rest, else a new segment opens, with a counted reason. The generation is recorded when it returns. If another request has
extended the segment meanwhile, it opens a segment that begins with the same ids.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.core.message_images import load_images
from agentrl.core.seeds import derive_seed
from agentrl.errors import Failure, UsageError
from agentrl.gateway.agent_env import AgentEnv
from agentrl.gateway.context_plan import ContextPlan, ContextPlanner, NoRoomError
from agentrl.gateway.known_requests import KnownRequests
from agentrl.gateway.protocol import ModelRequest, Reply, RequestError
from agentrl.gateway.reply import reply_of
from agentrl.gateway.turn_recorder import Arrival, Sampled, TurnRecorder
from agentrl.rollout.episode import Episode
from agentrl.types import StopReason

_MAX_EXCHANGES = 256
"""requests of an episode that a repetition can join"""


@dataclass(eq=False)
class Exchange:
    """A request and its answer, which repetitions of the request receive too."""

    task: asyncio.Task[list[Reply] | RequestError]
    connection: asyncio.BaseTransport | None
    """of the client that sent it"""
    delivered: bool = False

    @property
    def lost(self) -> bool:
        """Whether the client left before it had the answer."""
        return not self.delivered and (self.connection is None or self.connection.is_closing())

    @property
    def failed(self) -> bool:
        """Whether it has ended without replies."""
        if not self.task.done():
            return False
        return (
            self.task.cancelled() or self.task.exception() is not None or isinstance(self.task.result(), RequestError)
        )

    async def replies(self) -> list[Reply]:
        """Wait for the replies. They are made also if no client waits for them; only the end of the server cancels those that wait.

        Raises:
            RequestError: the request was refused, or the episode ended before.
        """
        try:
            answer = await self.task
        except asyncio.CancelledError:
            if not self.task.cancelled():
                raise
            raise RequestError(403, "the episode ended before the generation did", "episode_ended") from None
        if isinstance(answer, RequestError):
            raise answer
        return answer


class GatewaySession:
    """The requests of one episode.

    Args:
        episode: its recorder, limits, renderer and engine are used.
        env: names of the models, and the budgets of an episode.
    """

    def __init__(self, episode: Episode, env: AgentEnv | type[AgentEnv]) -> None:
        self.episode = episode
        self.models, self.side_models = tuple(env.models), tuple(env.side_models)
        self._prices, self._max_cost = env.prices, env.max_cost
        self._cost = 0.0
        """of all tokens so far"""
        self._until = time.perf_counter() + (math.inf if env.max_seconds is None else env.max_seconds)
        self.planner = ContextPlanner(episode.recorder, episode.runner.renderer, episode.runner.limits)
        self.counts: Counter[str] = Counter()
        """requests by what became of them, and segments by their reason"""
        self.recorder = TurnRecorder(episode, self.planner, self.counts)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """holds the failure that ends the episode"""
        self.spent = asyncio.Event()
        """set when the number of turns, the time, or what the tokens may cost is spent"""
        self.known = KnownRequests()
        self.sealed = False
        self.last_request = time.monotonic()
        self._record = asyncio.Lock()
        """held while a request is planned or recorded"""
        self._refused = 0
        self._requests = 0
        self._starting = 0
        """generations that will become turns"""
        self._exchanges: dict[Hashable, Exchange] = {}
        """the newest last"""
        self._side_calls: list[dict[str, Any]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- requests ----------------------------------------------------------------------------------------------------

    def exchange(
        self,
        request: ModelRequest,
        fingerprint: Hashable,
        *,
        long: bool,
        retried: bool,
        connection: asyncio.BaseTransport | None,
    ) -> Exchange:
        """The exchange of a request: a new one, or that of the request which this one repeats.

        Args:
            request: the request.
            fingerprint: equal for requests with the same bytes.
            long: rendering it may take longer than the event loop may be blocked.
            retried: the client says that it repeats a request.
            connection: of the client.

        Raises:
            RequestError: the episode has ended, or the model is unknown.
        """
        self.last_request = time.monotonic()
        if self.sealed:
            self.counts["requests after the end"] += 1
            raise RequestError(
                403, "the episode of this key has ended; no further request is answered", "episode_ended"
            )
        before = self._exchanges.get(fingerprint)
        if before is not None and (retried or before.lost) and not before.failed:
            self.counts["repeated requests"] += 1
            before.connection = connection
            return before
        self.check_model(request.model)
        made = Exchange(asyncio.get_running_loop().create_task(self._answer(request, long)), connection)
        self._tasks.add(made.task)
        self._exchanges.pop(fingerprint, None)
        self._exchanges[fingerprint] = made
        if len(self._exchanges) > _MAX_EXCHANGES:
            del self._exchanges[next(iter(self._exchanges))]
        return made

    def check_model(self, model: str) -> None:
        """Refuse a model that is not served.

        Raises:
            RequestError: its name is unknown.
        """
        if model not in (*self.models, *self.side_models):
            names = ", ".join((*self.models, *self.side_models))
            raise RequestError(404, f"the model {model!r:.80} is not served; use one of: {names}", "model_not_found")

    def count_tokens(self, request: ModelRequest) -> int:
        """Tokens of a request's prompt, rendered as a separate conversation.

        Raises:
            RequestError: the chat template refuses it.
        """
        self.counts["token counts"] += 1
        with _refused():
            return sum(len(ids) for _, ids in self.episode.runner.renderer.prompt(request.messages, request.tools))

    async def _answer(self, request: ModelRequest, long: bool) -> list[Reply] | RequestError:
        """The replies to a request, or why there are none. A failure ends the episode."""
        try:
            return await self._replies(request, long)
        except RequestError as e:
            return e
        except (Failure, UsageError) as e:
            self.fail(e)
            return RequestError(503, "the engine failed; the episode ends", "engine_failure")
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.discard(task)

    async def _replies(self, request: ModelRequest, long: bool) -> list[Reply]:
        request = await _with_images(request)
        too_costly = self._max_cost is not None and self._cost >= self._max_cost
        if too_costly or time.perf_counter() >= self._until:
            return self.refuse_budget(StopReason.MAX_TOKENS, request, ends=True)
        if request.model in self.side_models:
            return await self._answer_side_call(request, long)
        async with self._record:
            arrival = Arrival(number=self._requests, seen=len(self.recorder.drafts), at=time.perf_counter())
            self._requests += 1
            begun = len(self.recorder.drafts) + self._starting + self._refused
            if begun + request.n > self.episode.runner.limits.max_turns:
                return self.refuse_budget(StopReason.MAX_TURNS, request, ends=True)
            try:
                plan = await asyncio.to_thread(self.plan, request) if long else self.plan(request)
            except NoRoomError as e:
                return self.refuse_budget(e.bound, request)
            self._starting += request.n
        try:
            generations = await self._generations(plan, "policy", arrival.number)
        finally:
            self._starting -= request.n
        async with self._record:
            return [self.recorder.commit(plan, arrival, choice, sampled) for choice, sampled in enumerate(generations)]

    def plan(self, request: ModelRequest) -> ContextPlan:
        """Plan a request, as `ContextPlanner.plan`; what the template refuses becomes the error that the client reads."""
        with _refused():
            return self.planner.plan(request)

    async def sample(self, plan: ContextPlan, agent: str, number: int, choice: int) -> Sampled:
        """One generation for a planned request. Its seed follows from the place of the request in the run."""
        episode = self.episode
        spec = episode.spec
        seed = derive_seed(episode.runner.seed, spec.index, spec.attempt, agent, number, choice)
        sampling = episode.sampling(plan.room, seed)
        if plan.request.stop:
            sampling = replace(sampling, stop=(*sampling.stop, *plan.request.stop))
        generation, seconds = await episode.sample(plan.context, sampling, plan.images)
        return Sampled(generation, seconds, seed)

    async def _generations(self, plan: ContextPlan, agent: str, number: int) -> list[Sampled]:
        """The generations of a planned request."""
        if plan.request.n == 1:  # the usual case, without a separate task
            generations = [await self.sample(plan, agent, number, 0)]
        else:
            generations = await asyncio.gather(*(self.sample(plan, agent, number, c) for c in range(plan.request.n)))
        prompt, cached, sampled = self._prices
        for generation, _, _ in generations:
            known = generation.cached_tokens
            self._cost += prompt * (len(plan.context) - known) + cached * known + sampled * len(generation.ids)
        return generations

    def refuse_budget(self, bound: StopReason, request: ModelRequest, ends: bool = False) -> list[Reply]:
        """The answer to a request for which a budget has nothing left: an empty generation that was cut by its length.

        `ends`: the episode ends, after a while in which the agent may end by itself (`AgentEnv.grace_s`). Refused requests count as turns,
        so an agent that repeats them ends too.
        """
        self.counts[f"refused: {bound.value}"] += 1
        self._refused += 1
        self.recorder.bound = bound
        if ends:
            self.spent.set()
        number = f"refused-{self._refused}"
        return [Reply(text="", finish="length", number=f"{number}-{g}") for g in range(request.n)]

    def fail(self, failure: BaseException) -> None:
        """End the episode with a failure."""
        if not self.failed.done():
            self.failed.set_exception(failure)

    @property
    def busy(self) -> bool:
        """Whether a request waits for its generation."""
        return bool(self._tasks)

    async def seal(self) -> None:
        """Answer no further request; generations in flight are not recorded."""
        self.sealed, self.known = True, KnownRequests()
        running = [t for t in self._tasks if not t.done()]
        self.counts["requests in flight at the end"] += len(running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for exchange in self._exchanges.values():
            error = None if exchange.task.cancelled() else exchange.task.exception()
            if error is not None:
                self.fail(error)
            elif not exchange.failed and not exchange.delivered:
                self._mark_undelivered(await exchange.replies())
        if self.failed.done():
            self.failed.exception()  # retrieved, so that it is not reported as lost

    def summary(self) -> dict[str, Any]:
        """What the record holds of the requests besides the turns."""
        counts = {k: n for k, n in sorted(self.counts.items()) if n}
        cost = {} if self._max_cost is None else {"cost": self._cost}
        return {"counts": counts, **cost, **({"side_calls": self._side_calls} if self._side_calls else {})}

    # -- parts -------------------------------------------------------------------------------------------------------

    async def _answer_side_call(self, request: ModelRequest, long: bool) -> list[Reply]:
        """Answer a request to a side model: sampled, listed in the summary, and never trained."""
        self.counts["side calls"] += 1
        number, renderer = self.counts["side calls"], self.episode.runner.renderer
        try:
            with _refused():
                plan_call = self.planner.plan_side_call
                plan = await asyncio.to_thread(plan_call, request) if long else plan_call(request)
        except NoRoomError:
            raise RequestError(400, "the prompt leaves no room in the context", "context_length_exceeded") from None
        replies = []
        for choice, sampled in enumerate(await self._generations(plan, "side", number)):
            action, length = self.recorder.parse(plan, sampled.generation), len(plan.context)
            replies.append(reply_of(renderer, action, sampled.generation, request, f"side-{number}-{choice}", length))
            self._side_calls.append({"model": request.model, "messages": len(request.messages), "text": action.text})
        return replies

    def _mark_undelivered(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if reply.number.isdigit():
                self.recorder.drafts[int(reply.number)].info["undelivered"] = True
                self.counts["answers not delivered"] += 1


class _refused:  # noqa: N801  used as a statement: `with _refused():`
    """Converts what the renderer refuses into the error that the client reads."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UsageError):
            raise RequestError(400, str(error)) from error


async def _with_images(request: ModelRequest) -> ModelRequest:
    if request.paths:
        return request
    try:
        return replace(request, messages=await load_images(request.messages))
    except UsageError as e:
        raise RequestError(400, str(e)) from e
