"""`AgentEnv`, the environment of an agent that is a separate program, and what such an agent needs to reach the policy."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import orjson

from agentrl.core.child_process import killed_with_parent, signal_session
from agentrl.env import Env, overridable
from agentrl.errors import ContractError, EnvFailure
from agentrl.tool import check_limit
from agentrl.types import Action, StepResult, Task

MODEL = "policy"
"""name under which the policy is served"""
SIDE_MODEL = "side"
"""name for calls that are answered and not trained, such as titles"""
_KILL_AFTER_S = 2.0
"""between SIGTERM and SIGKILL"""
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TERM", "USER", "SYSTEMROOT", "VIRTUAL_ENV", "PYTHONPATH")
"""variables of this process that a command sees; the others may hold keys"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEndpoint:
    """Where an agent reaches the policy, valid until its episode ends.

    Example:
        >>> endpoint = ModelEndpoint(url="http://127.0.0.1:8000", api_key="secret")
        >>> endpoint.openai_base_url
        'http://127.0.0.1:8000/v1'
    """

    url: str
    """base URL of the Anthropic SDK"""
    api_key: str
    """secret of this episode"""
    model: str = MODEL
    side_model: str = SIDE_MODEL
    """model name for calls that are answered and not trained"""

    @property
    def openai_base_url(self) -> str:
        """Base URL of the OpenAI SDK."""
        return f"{self.url}/v1"

    def environ(self) -> dict[str, str]:
        """The environment variables that SDKs and agents read."""
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_BASE": self.openai_base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
            "ANTHROPIC_SMALL_FAST_MODEL": self.side_model,
        }

    def __repr__(self) -> str:
        return f"ModelEndpoint({self.url})"


class AgentEnv(Env):
    """An environment whose agent asks the policy for generations itself, over HTTP.

    Give a `command`, or override `run` with a Python agent or the call of a remote service. Rewards read the trajectory and its `state`: exit
    status, output, files, and what `run` returned. `step` is not called.

    Example:
        >>> class Solve(AgentEnv):
        ...     command = "python agent.py"
        ...     files = ("answer.txt",)
        ...
        >>> from openai import AsyncOpenAI
        >>> class Ask(AgentEnv):
        ...     async def run(self, task, endpoint):
        ...         client = AsyncOpenAI(base_url=endpoint.openai_base_url, api_key=endpoint.api_key)
        ...         answer = await client.chat.completions.create(model=endpoint.model, messages=task.messages)
        ...         return answer.choices[0].message.content
    """

    command: ClassVar[Sequence[str] | str | None] = None
    """the agent as a command, run in an empty folder with the variables of `ModelEndpoint.environ`, and with AGENTRL_TASK (the task as JSON) and
    AGENTRL_PROMPT. A str is split as a shell does. `{prompt}` in a word is replaced by the task's text. None: `run` is overridden"""
    environ: ClassVar[Mapping[str, str]] = {}
    """further variables of the command"""
    files: ClassVar[Sequence[str]] = ()
    """patterns of files in the command's folder that are kept as text in `state["files"]`"""
    models: ClassVar[Sequence[str]] = (MODEL,)
    """names under which the policy is served; the first is that of `ModelEndpoint.model`"""
    side_models: ClassVar[Sequence[str]] = (SIDE_MODEL,)
    """names whose requests the policy answers and is not trained on"""
    grace_s: ClassVar[float] = 10.0
    """seconds that an agent may continue after its turns are spent"""
    max_agents: ClassVar[int | None] = None
    """agents that run at the same time in one process, for a service with a limit; None: no limit besides `--concurrency`"""
    max_cost: ClassVar[float | None] = None
    """what the tokens of an episode may cost, side calls included; when it is spent, requests are answered as after the last turn. None: no limit"""
    max_seconds: ClassVar[float | None] = None
    """seconds from the start of an episode after which requests are answered as after the last turn; a generation in progress is finished. None: no
    limit besides `--episode-timeout-s`, which ends the episode at any moment"""
    prices: ClassVar[tuple[float, float, float]] = (1.0, 1.0, 1.0)
    """cost of a token of a prompt, of one that the engine had cached, and of a sampled one"""
    max_output_bytes: ClassVar[int] = 1 << 16
    """kept of the end of a command's output, and of each file"""

    _outcome: dict[str, Any] | None = None
    gateway: Mapping[str, Any] = {}
    """counts of requests and segments, set when the agent has ended"""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the class attributes that are limits.

        Raises:
            ContractError: one of them cannot be used.
        """
        super().__init_subclass__(**kwargs)
        where = f"environment {cls.__name__}"
        if cls.max_agents is not None:
            check_limit(where, "max_agents", cls.max_agents, least=1)
        seconds: Any = cls.max_seconds
        if seconds is not None and not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
            raise ContractError(f"{where}: max_seconds must be a number above 0, or None; found {seconds!r:.60}")
        prices: Any = cls.prices
        most: Any = 0.0 if cls.max_cost is None else cls.max_cost
        amounts = [*prices, most] if isinstance(prices, (tuple, list)) else []
        if len(amounts) != 4 or not all(isinstance(a, (int, float)) and 0 <= a < math.inf for a in amounts):
            raise ContractError(
                f"{where}: prices must be three numbers of at least 0 (prompt, cached, sampled) and max_cost another one or None, "
                f"found {cls.prices!r:.60} and {cls.max_cost!r:.60}"
            )

    @overridable
    async def run(self, task: Task, endpoint: ModelEndpoint) -> Any:
        """Run the agent to its end. The default runs `command`. A sync override runs in a thread.

        Args:
            task: the task to play.
            endpoint: where the agent reaches the policy.

        Returns:
            A JSON value, which rewards read as `trajectory.state["result"]`.

        Raises:
            InfraError: infrastructure failed. The episode is started again, and is not scored. Any other exception has the same effect.
        """
        if self.command is None:
            raise ContractError(f"{self.label()} must set `command` or override `run`")
        words = shlex.split(self.command) if isinstance(self.command, str) else list(self.command)
        folder = Path(tempfile.mkdtemp(prefix="agentrl-agent-"))
        try:
            await self._run_command(words, folder, task, endpoint)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)

    async def step(self, action: Action) -> StepResult:
        """Not called: the agent plays."""
        raise ContractError(f"{self.label()} is an AgentEnv, whose agent plays the turns; it needs the gateway")

    def state(self) -> Mapping[str, Any]:
        """What became of the agent: `result` of `run`, or `exit_status`, `output` and `files` of a command; and counts of the gateway."""
        outcome = self._outcome or {}
        return {**outcome, "gateway": dict(self.gateway)} if self.gateway else outcome

    def set_outcome(self, outcome: Mapping[str, Any]) -> None:
        """Set what `state` returns; used by replays, which do not run the agent."""
        self._outcome = dict(outcome)

    async def _run_command(self, words: list[str], folder: Path, task: Task, endpoint: ModelEndpoint) -> None:
        prompt = _text(task)
        words = [w.replace("{prompt}", prompt) for w in words]
        if words[0] == "python":
            words[0] = sys.executable
        variables = {k: v for k in _PASSED_ON if (v := os.environ.get(k)) is not None}
        variables |= {**endpoint.environ(), "AGENTRL_PROMPT": prompt, "AGENTRL_TASK": _json(task), **self.environ}
        try:
            process = await asyncio.create_subprocess_exec(
                *killed_with_parent(words),
                cwd=folder,
                env=variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as e:
            raise ContractError(f"{self.label()}.command: {words[0]!r} cannot be started: {e.strerror or e}") from e
        output = bytearray()
        try:
            assert process.stdout is not None
            while chunk := await process.stdout.read(1 << 16):
                output += chunk
                del output[: -self.max_output_bytes]
            await process.wait()
        finally:
            await _end(process)
            self._outcome = {
                "exit_status": process.returncode,
                "output": _redacted(bytes(output), endpoint.api_key),
                **(
                    {"files": _files(folder, self.files, self.max_output_bytes, endpoint.api_key)} if self.files else {}
                ),
            }


def check_finished(env: AgentEnv, turns: int) -> None:
    """Refuse to score an agent that never reached the policy.

    Raises:
        EnvFailure: it made no request.
    """
    if turns:
        return
    outcome = env.state()
    status, output = outcome.get("exit_status"), str(outcome.get("output") or "").strip()
    ended = "" if status is None else f"; it exited with status {status}: {output[-300:]!r}"
    raise EnvFailure(f"the agent asked for no generation{ended}", "the agent asked for no generation")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command and what it started."""
    signal_session(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(_KILL_AFTER_S):
            await process.wait()
    signal_session(process.pid, signal.SIGKILL)
    await process.wait()


def _files(folder: Path, patterns: Sequence[str], most: int, secret: str) -> dict[str, str]:
    """The text of the files in a folder that match, by their path. Links are not followed."""
    found: dict[str, str] = {}
    for path in sorted({p for pattern in patterns for p in folder.glob(pattern)}):
        if path.is_file() and not path.is_symlink() and path.resolve().is_relative_to(folder.resolve()):
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = _redacted(file.read(most), secret)
    return found


def _redacted(data: bytes, secret: str) -> str:
    return data.decode("utf-8", "replace").replace(secret, "[key]")


def _text(task: Task) -> str:
    """The text of a task's last message."""
    content = task.messages[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(str(p.get("text", "")) for p in content)


def _json(task: Task) -> str:
    """A task for its agent, without the label."""
    value = {"id": task.id, "messages": task.messages, "metadata": dict(task.metadata)}
    return orjson.dumps(value, default=repr).decode()
