"""Run an environment with a scripted and a random policy, without a model, and report what violates its contract.

Episodes use the real runner, renderer, tool executor and rewards; only the engine is replaced, by a policy that writes text. Each episode
is run twice with the same seed: concurrently with others, then alone. A difference means that the environment does not depend on its seed
only, or that its instances share state.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from agentrl.check.findings import Findings, Report, Severity
from agentrl.check.instrumented_env import TIMEOUT_S, instrument
from agentrl.check.scripted_policies import Policy, make_tiny_renderer
from agentrl.core.timeout_pool import TimeoutPool
from agentrl.engine.base import SamplingParams
from agentrl.env import Env, task_tools, tasks_of
from agentrl.errors import ConfigError, RewardFailure, UsageError
from agentrl.reward import Reward, Scorer, resolve_rewards
from agentrl.rollout.env_instance import ThreadPools
from agentrl.rollout.episode import EpisodeRunner, Limits
from agentrl.tool import ToolSpec
from agentrl.types import EpisodeSpec, Status, StopReason, Task, Trajectory

_LIMITS = Limits(
    max_turns=8, max_response_tokens=1 << 20, context_length=1 << 21, episode_timeout_s=60.0, max_invalid_actions=9
)
_CONCURRENT = 8
"""Episodes that run at the same time in the first pass."""
_MAX_TASKS = 200
"""Tasks of a split that are checked."""
_GROUPS = 3
"""Groups of two episodes whose first observations are compared."""
_FIRST = "the first observation"
_SETUP_TIMEOUT_S = 300.0
"""Time limit for tasks and the constructor: an environment may build an index first."""


async def check_env(
    env_class: type[Env],
    args: Mapping[str, Any] | None = None,
    *,
    tasks: Sequence[Task] | None = None,
    episodes: int = 20,
    seed: int = 0,
) -> Report:
    """Check that an environment keeps its contract.

    Args:
        env_class: the environment.
        args: arguments of its constructor.
        tasks: tasks to run; by default the environment's own, or two generated ones if it has none.
        episodes: number of episodes; each is run twice.
        seed: seed of the episodes and of the policies.

    Returns:
        The report. `report.ok` is False if the environment violates its contract.

    Example:
        >>> report = await check_env(Maze, {"size": 5}, episodes=4)
        >>> print(report)
    """
    findings = Findings()
    args = dict(args or {})
    tasks = list(tasks) if tasks else await _own_tasks(env_class, args, findings)
    _check_tasks(env_class, tasks, findings)
    rewards = _resolved_rewards(env_class, findings)
    tools = await _tool_specs(env_class, args, tasks[:episodes], findings)
    report = Report(env_class.label())
    if tools is not None:
        player = _Player(env_class, args, rewards, tools, findings, seed)
        specs = [EpisodeSpec(tasks[i % len(tasks)], i, i) for i in range(episodes)]
        concurrent, alone = await player.run(specs, _CONCURRENT), await player.run(specs, 1)
        pairs = [(a, b) for a, b in zip(concurrent, alone, strict=True) if a is not None and b is not None]
        _check_determinism(pairs, findings)
        await _check_group_rewards(rewards, pairs, findings)
        complete = [t for t in (*concurrent, *alone) if t is not None]
        _check_trajectories(complete, findings)
        if not any(_first_difference(a, b) == _FIRST for a, b in pairs):
            other = _Player(env_class, args, (), tools, Findings(), seed)  # its episodes were reported above
            await _check_groups(other, tasks, episodes, findings)
        report.episodes, report.turns = len(complete), sum(len(t.turns) for t in complete)
        report.scores = [t.score for t in complete if t.status is not Status.FAILED]
        report.reasons = dict(Counter(t.stop_reason.value for t in complete))
    report.findings = findings.sorted()
    return report


class _Player:
    """Runs episodes of the instrumented environment."""

    def __init__(
        self,
        env: type[Env],
        args: dict[str, Any],
        rewards: Sequence[Reward],
        tools: Mapping[str, Sequence[ToolSpec]],
        findings: Findings,
        seed: int,
    ) -> None:
        self.env = instrument(env, findings)
        self.make = functools.partial(self.env, **args)
        self.rewards, self.tools, self.findings, self.seed = rewards, tools, findings, seed
        self.renderer = make_tiny_renderer(env.action_format)

    async def run(self, specs: Sequence[EpisodeSpec], concurrency: int) -> list[Trajectory | None]:
        """Return one trajectory per spec; None where the environment violated its contract."""
        scorer = Scorer(self.rewards)
        engine = Policy(self.renderer, lambda task: self.tools[task.id], {s.episode_id: s for s in specs}).engine()
        sampling = SamplingParams(max_new_tokens=1)
        runner = EpisodeRunner(
            make_env=self.make,
            env_class=self.env,
            engine=engine,
            renderer=self.renderer,
            scorer=scorer,
            limits=replace(_LIMITS, max_turns=max(_LIMITS.max_turns, max(map(len, self.tools.values())) + 3)),
            sampling=sampling,
            seed=self.seed,
            pools=ThreadPools(self.env),
        )
        slots = asyncio.Semaphore(concurrency)

        async def play(spec: EpisodeSpec) -> Trajectory | None:
            async with slots:
                try:
                    return await runner.run(spec)
                except UsageError as e:
                    self.findings.error("contract", str(e), "see the docstring of agentrl.Env for what methods return")
                    return None

        try:
            return list(await asyncio.gather(*map(play, specs)))
        finally:
            runner.close()
            scorer.close()


# -- before the episodes -----------------------------------------------------------------------------------------------


async def _own_tasks(env_class: type[Env], args: Mapping[str, Any], findings: Findings) -> list[Task]:
    """Return the environment's tasks of both splits; generated ones if it has none."""
    tasks: list[Task] = []
    pool = TimeoutPool("check")
    for split in ("train", "test"):
        where = f"tasks({split!r})"
        try:
            items = await pool.call(_first_tasks, env_class, split, args, timeout_s=_SETUP_TIMEOUT_S)
        except ConfigError as e:
            do = "give --prompt-data to check it with your tasks; this check used generated ones"
            findings.note("tasks", str(e), do)
            break
        except Exception as e:  # noqa: BLE001  user code: whatever it raises is a finding
            findings.error("tasks", f"{where} raised {type(e).__name__}: {e}", "yield agentrl.Task objects")
            continue
        wrong = next((type(item).__name__ for item in items if not isinstance(item, Task)), None)
        if wrong is not None:
            findings.error("tasks", f"{where} yields {wrong}, not agentrl.Task", "yield Task(id, prompt, label)")
        if not items:
            findings.warning(
                "tasks", f"{where} is empty", "yield tasks, or raise ConfigError if there is no such split"
            )
        tasks += [item for item in items if isinstance(item, Task)]
    pool.close()
    return tasks or [Task("generated-0", "What is one plus one?", "2"), Task("generated-1", "Say hello.", "hello")]


def _first_tasks(env_class: type[Env], split: str, args: Mapping[str, Any]) -> list[Any]:
    return list(islice(tasks_of(env_class, split, args), _MAX_TASKS))


def _check_tasks(env_class: type[Env], tasks: Iterable[Task], findings: Findings) -> None:
    repeated = [i for i, count in Counter(t.id for t in tasks).items() if count > 1]
    if repeated:
        what = f"{len(repeated)} ids occur twice, for example {repeated[0]!r}"
        findings.warning("tasks", what, "give each task a unique id, over all splits")
    if env_class.rewards and all(t.label is None for t in tasks):
        what = "no task has a label, but the environment has rewards"
        findings.warning("tasks", what, "set Task.label to the value that the rewards compare with")
    for task in tasks:
        try:
            env_class.check_task(task)
        except UsageError as e:
            report = findings.note if task.id.startswith("generated-") else findings.error
            report("check_task", f"refuses task {task.id!r}: {e}", "yield only tasks that it accepts")


def _resolved_rewards(env_class: type[Env], findings: Findings) -> tuple[Reward, ...]:
    if not env_class.rewards:
        findings.note("rewards", "it names no rewards", "nothing, if it returns step rewards or --reward is given")
    try:
        return resolve_rewards(env_class.rewards)
    except UsageError as e:
        findings.error("rewards", str(e), "name functions, @reward functions or registered names")
        return ()


async def _tool_specs(
    env_class: type[Env], args: dict[str, Any], tasks: Sequence[Task], findings: Findings
) -> dict[str, list[ToolSpec]] | None:
    """Return the tools of each task by its id; None if no instance can be created."""
    pool = TimeoutPool("check")
    tools: dict[str, list[ToolSpec]] = {}
    try:
        env = await pool.call(env_class, timeout_s=_SETUP_TIMEOUT_S, **args)
        await pool.call(env.check_ready, timeout_s=_SETUP_TIMEOUT_S)
        for task in tasks:
            tools[task.id] = await pool.call(task_tools, env, task, timeout_s=_SETUP_TIMEOUT_S)
    except ConfigError as e:
        findings.error("check_ready", str(e), "provide what it needs, then check again")
        return None
    except UsageError as e:
        findings.error("tools", str(e), "give each tool a unique name and each parameter a type with a JSON schema")
        return None
    except Exception as e:  # noqa: BLE001  user code: whatever it raises is a finding
        do = "acquire resources in reset, and pass the arguments that it needs"
        findings.error("constructor", f"raised {type(e).__name__}: {e}", do)
        return None
    try:
        await pool.call(env.close, timeout_s=TIMEOUT_S)
    except Exception as e:  # noqa: BLE001  as above
        what = f"raised {type(e).__name__} without a preceding reset: {e}"
        findings.warning("close", what, "let it accept an instance whose reset failed")
    pool.close()
    for spec in {spec.name: spec for specs in tools.values() for spec in specs}.values():
        _check_tool(spec, findings)
    return tools


def _check_tool(spec: ToolSpec, findings: Findings) -> None:
    where = f"tool {spec.name}"
    if not spec.description:
        findings.warning(where, "has no description", "write a docstring: the policy reads it")
    for name, schema in spec.parameters.get("properties", {}).items():
        if not {"type", "anyOf", "allOf", "$ref", "enum", "const"} & schema.keys():
            findings.warning(where, f"parameter {name!r} accepts any value", "annotate it with a type")
        elif not schema.get("description"):
            findings.note(where, f"parameter {name!r} has no description", "describe it under Args: in the docstring")


# -- after the episodes ------------------------------------------------------------------------------------------------


def _check_determinism(pairs: Iterable[tuple[Trajectory, Trajectory]], findings: Findings) -> None:
    for a, b in pairs:
        if StopReason.EPISODE_TIMEOUT in (a.stop_reason, b.stop_reason):
            continue
        difference = _first_difference(a, b)
        if difference is not None:
            what = f"two episodes with the same seed and actions differ: {difference}"
            findings.error(
                "determinism", what, "use only the seed given to reset, and share no state between instances"
            )


def _first_difference(a: Trajectory, b: Trajectory) -> str | None:
    prompts = [t.segments[0].spans[0].ids if t.segments else () for t in (a, b)]
    if prompts[0] != prompts[1]:
        return _FIRST
    for x, y in zip(a.turns, b.turns, strict=False):
        for name in ("observation", "reward", "state_key"):
            if getattr(x, name) != getattr(y, name):
                return name
        if [r.content for r in x.action.results] != [r.content for r in y.action.results]:
            return "the result of a tool"
    if a.stop_reason is not b.stop_reason or len(a.turns) != len(b.turns):
        return "the end of the episode"
    return "the final rewards" if a.rewards != b.rewards else None


async def _check_groups(player: _Player, tasks: Sequence[Task], episodes: int, findings: Findings) -> None:
    """Warn if the first observations of a group differ: its episodes would be compared although they played different games."""
    for number, task in enumerate(tasks[:_GROUPS]):
        group, index = episodes + number, 2 * (episodes + 2 * number)
        members = await player.run([EpisodeSpec(task, group, index), EpisodeSpec(task, group, index + 2)], 1)
        prompts = [t.segments[0].spans[0].ids for t in members if t is not None and t.segments]
        if len(prompts) == 2 and prompts[0] != prompts[1]:
            what = "the first observations of one group differ, although only the seed differs: its episodes play different games"
            do = (
                "draw what the policy is compared on from `group_seed`, which is equal in a group: "
                "def reset(self, task, *, seed, group_seed)"
            )
            findings.warning("reset", what, do)
            return


async def _check_group_rewards(
    rewards: Sequence[Reward], pairs: Iterable[tuple[Trajectory, Trajectory]], findings: Findings
) -> None:
    scorer = Scorer([r for r in rewards if r.group])
    for pair in pairs if scorer.group else ():
        try:
            await scorer.score_group(list(pair))
        except RewardFailure as e:
            findings.error("rewards", str(e), "return one finite number, dict of numbers or None per trajectory")
    scorer.close()


def _check_trajectories(trajectories: Sequence[Trajectory], findings: Findings) -> None:
    reported = any(f.where in ("reset", "step", "state", "close") for f in findings.sorted())
    for t in trajectories:
        _check_end(t, reported, findings)
        for result in (r for turn in t.turns for r in turn.action.results):
            if result.is_error and not result.content.startswith(("error: bad arguments", "error: unknown tool")):
                what = f"failed on arguments that fit its schema: {result.content:.100}"
                do = "nothing, if the message helps the policy; otherwise handle the exception in the tool"
                findings.warning(f"tool {result.name}", what, do)
    scores = [t.score for t in trajectories if t.status is not Status.FAILED]
    if trajectories and not scores and not any(f.severity is Severity.ERROR for f in findings.sorted()):
        what = f"all {len(trajectories)} episodes failed, so that no reward and no end was checked"
        findings.error("episodes", what, "remove the causes that are listed here, then check again")
    if len(scores) > 1 and math.isclose(min(scores), max(scores)):
        what = f"every episode scored {scores[0]:g}, whatever the actions"
        do = "check that some action is rewarded: a group of equal scores has no gradient"
        findings.warning("rewards", what, do)


def _check_end(t: Trajectory, reported: bool, findings: Findings) -> None:
    """Report why an episode failed. `reported`: the instrumented methods have already reported something."""
    cause = t.cause or ""
    if t.stop_reason is StopReason.REWARD_FAILURE:
        do = "return a finite number, a dict of them or None, also for episodes that failed"
        findings.error("rewards", f"{cause}; {t.detail}", do)
    elif t.stop_reason is StopReason.TOOL_FAILURE:
        findings.warning("tools", cause, "start the infrastructure that the tool needs, or check its address")
    elif t.stop_reason is StopReason.EPISODE_TIMEOUT:
        what = f"an episode took longer than {_LIMITS.episode_timeout_s:g} s"
        findings.error("time", what, "make the methods faster, or reduce timeout_s")
    elif cause.endswith("timeout"):
        findings.error("time", cause, f"return within {TIMEOUT_S:g} s and the class's timeout_s, or raise")
    elif cause.startswith("env constructor"):
        do = "acquire resources in reset, and share nothing that only one instance can use"
        findings.error("constructor", cause, do)
    elif t.stop_reason is StopReason.ENV_FAILURE and not reported:
        findings.error("failures", t.detail or cause, "return a StepResult for any action")
