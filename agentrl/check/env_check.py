"""`agentrl check`: run an environment with a scripted and a random policy, without a model, and say what breaks its contract (design §4).

Episodes go through the real runner, renderer, tool executor and rewards; only the engine is a policy that writes text. Every episode is
played twice, side by side with others and then alone: what differs does not follow from the seed, or leaks between instances.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from agentrl.check.findings import Findings, Report
from agentrl.check.probe import TIMEOUT_S, probe
from agentrl.check.scripted_policies import Policy, make_tiny_renderer
from agentrl.core.timeout_pool import Pool
from agentrl.engine.base import SamplingParams
from agentrl.env import Env
from agentrl.errors import ConfigError, RewardFailure, UsageError
from agentrl.reward import Reward, Scorer, resolve_rewards
from agentrl.rollout.episode import EpisodeRunner, Limits
from agentrl.tool import ToolSpec
from agentrl.types import EpisodeSpec, Status, StopReason, Task, Trajectory

_LIMITS = Limits(
    max_turns=8, max_response_tokens=1 << 20, context_length=1 << 21, episode_timeout_s=60.0, max_invalid_actions=9
)
_TOGETHER = 8
_TASKS = 200
"""of a split that are looked at"""
_TASKS_S = 300.0
"""for making them: an environment may build an index first"""


async def check_env(
    env_class: type[Env],
    args: Mapping[str, Any] | None = None,
    *,
    tasks: Sequence[Task] | None = None,
    episodes: int = 20,
    seed: int = 0,
) -> Report:
    """Check an environment. `args` are its constructor's; `tasks` None: its own, else made-up ones."""
    found = Findings()
    args = dict(args or {})
    tasks = list(tasks) if tasks else await _own_tasks(env_class, found)
    _check_tasks(env_class, tasks, found)
    rewards = _rewards(env_class, found)
    tools = await _tools(env_class, args, found)
    report = Report(env_class.label())
    if tools is not None:
        check = _Check(env_class, args, rewards, tools, found, seed)
        specs = [EpisodeSpec(tasks[i % len(tasks)], i, i) for i in range(episodes)]
        first, second = await check.run(specs, _TOGETHER), await check.run(specs, 1)
        _compare(first, second, found)
        await _check_group_rewards(rewards, first, second, found)
        done = [t for t in (*first, *second) if t is not None]
        _check_trajectories(done, found)
        report.episodes, report.turns = len(done), sum(len(t.turns) for t in done)
        report.scores = [t.score for t in done if t.status is not Status.FAILED]
        report.reasons = dict(Counter(t.stop_reason.value for t in done))
    report.findings = found.sorted()
    return report


class _Check:
    """Plays episodes of a probed environment."""

    def __init__(
        self,
        env: type[Env],
        args: dict[str, Any],
        rewards: Sequence[Reward],
        tools: Sequence[ToolSpec],
        found: Findings,
        seed: int,
    ) -> None:
        self.probe = probe(env, found)
        self.make = functools.partial(self.probe, **args)
        self.rewards, self.tools, self.found, self.seed = rewards, tools, found, seed
        self.renderer = make_tiny_renderer(env.action_format)

    async def run(self, specs: Sequence[EpisodeSpec], together: int) -> list[Trajectory | None]:
        """One trajectory per spec; None where the contract was broken."""
        scorer = Scorer(self.rewards)
        engine = Policy(self.renderer, self.tools, {s.episode_id: s for s in specs}).engine()
        sampling = SamplingParams(max_new_tokens=1)
        runner = EpisodeRunner(
            self.make, self.probe, engine, self.renderer, scorer, limits=_LIMITS, sampling=sampling, seed=self.seed
        )
        slots = asyncio.Semaphore(together)

        async def play(spec: EpisodeSpec) -> Trajectory | None:
            async with slots:
                try:
                    return await runner.run(spec)
                except UsageError as e:
                    self.found.error(
                        "contract", str(e), "see the docstring of agentrl.Env for what each method returns"
                    )
                    return None

        try:
            return list(await asyncio.gather(*map(play, specs)))
        finally:
            runner.close()
            scorer.close()


# -- before any episode ----------------------------------------------------------------------------------------------


async def _own_tasks(env_class: type[Env], found: Findings) -> list[Task]:
    """Its tasks of both splits; made-up ones if it has none."""
    tasks: list[Task] = []
    pool = Pool("check")
    for split in ("train", "test"):
        try:
            items = await pool.call(_some_tasks, env_class, split, timeout_s=_TASKS_S)
        except ConfigError as e:
            found.note("tasks", str(e), "nothing, if it is meant for --prompt-data; made-up tasks were used here")
            break
        except Exception as e:  # noqa: BLE001  user code: whatever it raises is a finding
            found.error("tasks", f"tasks({split!r}) raised {type(e).__name__}: {e}", "yield agentrl.Task objects")
            continue
        wrong = next((i for i in items if not isinstance(i, Task)), None)
        if wrong is not None:
            found.error(
                "tasks",
                f"tasks({split!r}) yields {type(wrong).__name__}, not agentrl.Task",
                "yield Task(id, prompt, label)",
            )
        if not items:
            found.warning(
                "tasks", f"tasks({split!r}) is empty", "yield some, or raise ConfigError for a split that is not there"
            )
        tasks += [i for i in items if isinstance(i, Task)]
    pool.close()
    return tasks or [Task("made-up-0", "What is one plus one?", "2"), Task("made-up-1", "Say hello.", "hello")]


def _some_tasks(env_class: type[Env], split: str) -> list[Any]:
    return list(islice(env_class.tasks(split), _TASKS))


def _check_tasks(env_class: type[Env], tasks: Iterable[Task], found: Findings) -> None:
    twice = [i for i, n in Counter(t.id for t in tasks).items() if n > 1]
    if twice:
        found.warning(
            "tasks",
            f"{len(twice)} ids occur twice, {twice[0]!r} for one",
            "give each task an id of its own, over all splits",
        )
    if env_class.rewards and all(t.label is None for t in tasks):
        found.warning(
            "tasks", "no task has a label, but there are rewards", "set Task.label to what the rewards compare with"
        )
    for task in tasks:
        try:
            env_class.check_task(task)
        except UsageError as e:
            made_up = task.id.startswith("made-up-")
            (found.note if made_up else found.error)(
                "check_task", f"refuses task {task.id!r}: {e}", "give tasks that it takes"
            )


def _rewards(env_class: type[Env], found: Findings) -> tuple[Reward, ...]:
    if not env_class.rewards:
        found.note("rewards", "it names no rewards", "nothing, if its step rewards say everything or --reward is given")
    try:
        return resolve_rewards(env_class.rewards)
    except UsageError as e:
        found.error("rewards", str(e), "name functions, @reward functions or registered names")
        return ()


async def _tools(env_class: type[Env], args: dict[str, Any], found: Findings) -> list[ToolSpec] | None:
    """The tools of one instance; None if there can be no instance."""
    pool = Pool("check")
    try:
        env = await pool.call(env_class, timeout_s=_TASKS_S, **args)
        specs: list[ToolSpec] = env.tool_specs()
    except UsageError as e:
        found.error(
            "tools", str(e), "give each tool a name of its own and every parameter a type that has a JSON schema"
        )
        return None
    except Exception as e:  # noqa: BLE001  user code: whatever it raises is a finding
        found.error(
            "constructor",
            f"raised {type(e).__name__}: {e}",
            "take resources in reset, and give it the arguments it needs",
        )
        return None
    try:
        await pool.call(env.close, timeout_s=TIMEOUT_S)
    except Exception as e:  # noqa: BLE001  as above
        found.warning(
            "close",
            f"raised {type(e).__name__} when there was no reset: {e}",
            "let it stand a reset that failed half-way",
        )
    pool.close()
    for spec in specs:
        if not spec.description:
            found.warning(f"tool {spec.name}", "has no description", "write a docstring: it is what the policy reads")
        for name, schema in spec.parameters.get("properties", {}).items():
            if not {"type", "anyOf", "allOf", "$ref", "enum", "const"} & schema.keys():
                found.warning(f"tool {spec.name}", f"parameter {name!r} may be anything", "annotate it with a type")
            elif not schema.get("description"):
                found.note(
                    f"tool {spec.name}",
                    f"parameter {name!r} has no description",
                    "name it under Args: in the docstring",
                )
    return specs


# -- after the episodes ----------------------------------------------------------------------------------------------


def _compare(first: Sequence[Trajectory | None], second: Sequence[Trajectory | None], found: Findings) -> None:
    """The same seeds and actions must give the same observations."""
    for a, b in zip(first, second, strict=True):
        if a is None or b is None or StopReason.EPISODE_TIMEOUT in (a.stop_reason, b.stop_reason):
            continue
        where = _difference(a, b)
        if where is not None:
            found.error(
                "determinism",
                f"two runs with the same seed and actions differ: {where}",
                "draw only from the seed given to reset, and share nothing between instances",
            )


def _difference(a: Trajectory, b: Trajectory) -> str | None:
    prompts = [g.segments[0].spans[0].ids if g.segments else () for g in (a, b)]
    if prompts[0] != prompts[1]:
        return "the first observation"
    for x, y in zip(a.turns, b.turns, strict=False):
        for name in ("observation", "reward", "state_key"):
            if getattr(x, name) != getattr(y, name):
                return name
        if [r.content for r in x.action.results] != [r.content for r in y.action.results]:
            return "the result of a tool"
    if a.stop_reason is not b.stop_reason or len(a.turns) != len(b.turns):
        return "when it ends"
    return "the final rewards" if a.rewards != b.rewards else None


async def _check_group_rewards(
    rewards: Sequence[Reward], first: Sequence[Trajectory | None], second: Sequence[Trajectory | None], found: Findings
) -> None:
    scorer = Scorer([r for r in rewards if r.group])
    pairs = [[a, b] for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    for pair in pairs if scorer.group else ():
        try:
            await scorer.score_group(pair)
        except RewardFailure as e:
            found.error("rewards", str(e), "return one finite number, dict of numbers or None per trajectory")
    scorer.close()


def _check_trajectories(done: Sequence[Trajectory], found: Findings) -> None:
    probed = any(f.where in ("reset", "step", "state", "close") for f in found.sorted())
    for t in done:
        cause = t.cause or ""
        if t.stop_reason is StopReason.REWARD_FAILURE:
            found.error(
                "rewards",
                f"{cause}; {t.detail}",
                "return a finite number, a dict of them or None, also for episodes that went wrong",
            )
        elif t.stop_reason is StopReason.TOOL_FAILURE:
            found.warning("tools", cause, "its infrastructure does not answer here; start it, or check where it runs")
        elif t.stop_reason is StopReason.EPISODE_TIMEOUT:
            what = f"an episode took longer than {_LIMITS.episode_timeout_s:g} s"
            found.error("time", what, "make its methods faster, or its timeout_s shorter")
        elif cause.endswith("timeout"):
            found.error("time", cause, f"answer within {TIMEOUT_S:g} s and the class's timeout_s, or raise")
        elif cause.startswith("env constructor"):
            found.error(
                "constructor", cause, "take resources in reset, and share nothing that only one instance can have"
            )
        elif t.stop_reason is StopReason.ENV_FAILURE and not probed:
            found.error("failures", t.detail or cause, "answer any action with a StepResult")
        for result in (r for turn in t.turns for r in turn.action.results):
            if result.is_error and not result.content.startswith(("error: bad arguments", "error: unknown tool")):
                what = f"failed on arguments that fit its schema: {result.content:.100}"
                found.warning(
                    f"tool {result.name}", what, "nothing, if its words help the policy; else catch what is expected"
                )
    scores = [t.score for t in done if t.status is not Status.FAILED]
    if len(scores) > 1 and math.isclose(min(scores), max(scores)):
        what = f"every episode scored {scores[0]:g}, whatever was done"
        found.warning("rewards", what, "see whether any action is rewarded: a group of equal scores teaches nothing")
