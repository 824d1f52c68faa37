"""Settings of what the policy acts in: environment and tools, data, the gateway of external agents."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from agentrl.config.settings.base import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EnvSettings:
    """Environment, rewards and the form of episodes."""

    env: Annotated[str | None, "NAME|FILE.py"] = None
    """environment: a name, module:Class or file.py; several as NAME=SHARE (default: the tasks of --prompt-data, each answered in one turn)

    `file.py:Class` chooses between several environments of a file. `search_r1` is the example. Without an environment, tasks come from
    --prompt-data, `ToolEnv` plays them, and --reward scores the answers. `--env a=0.7 b=0.3` mixes environments in these shares of the
    groups; --env-setting gives each its own settings."""
    env_args: Annotated[dict[str, Any], "NAME=VALUE"] = field(default_factory=dict)
    """constructor argument of --env; repeatable (default: none)"""
    env_settings: Annotated[dict[str, Any], "ENV.SETTING=VALUE"] = field(default_factory=dict)
    """setting of one of several environments; repeatable (default: none)

    Such as `--env-setting search_r1.max_turns=4` or `--env-setting 'search_r1.env_args={topk = 2}'`. Its arguments, data, rewards and limits can
    be set, and its `concurrency`."""
    players: Annotated[dict[str, str], "ROLE=PLAYER"] = field(default_factory=dict)
    """who plays a role of an environment with several speakers; repeatable (default: the environment's choice, or the policy)

    policy: the policy, which is trained in this role. initial: the model that the run starts from, or a model folder: frozen weights, on the local
    engine. http://HOST:PORT/v1: a model behind an OpenAI-compatible address, with #NAME one of several. file.py:function: a function of the
    role's messages (and `seed`) that returns a text."""
    env_isolation: Literal["thread", "process"] | None = None
    """run each environment, with its tools, in a thread of the run or in a separate process (default: the environment's choice)

    In a separate process a hang, a crash or a leak of the environment ends that process only, and its episode is started again. The
    environment must be defined at the top level of a module or file, and its arguments must be picklable."""
    reward: Annotated[tuple[str, ...], "NAME"] = ()
    """rewards, each NAME or NAME=WEIGHT (default: the environment's)

    A name is registered, or `module:function`, or `file.py:function`. A file with one reward needs no function name."""
    custom_rm_path: Annotated[str | None, "MODULE.FUNCTION"] = None
    """reward function written for slime: `async f(args, sample)`, or `file.py:f` (default: --reward)"""
    group_rm: bool = False
    """--custom-rm-path scores the samples of a group at once: `f(args, samples)` returns a list"""
    custom_generate_function_path: Annotated[str | None, "MODULE.FUNCTION"] = None
    """generate function written for slime, which plays each episode: `async f(args, sample, sampling_params)` (default: --env)

    Every token that it marks as trained must be one that the engine sampled."""
    rollout_function_path: Annotated[str | None, "MODULE.FUNCTION"] = None
    """rollout function written for slime: `f(args, rollout_id, data_source, evaluation)` returns groups of samples (default: none)"""
    reward_key: Annotated[str | None, "NAME"] = None
    """component that counts, of a reward that returns a dict (default: all of them, each with the reward's weight)

    The other components are reported with weight 0, or left out if they are not numbers."""
    action_format: Annotated[str | None, "NAME"] = None
    """syntax of tool calls and answers, such as hermes or search_r1 (default: the environment's choice, or the model family's)"""
    tools_in_prompt: bool = False
    """write the tools and how to call them into the system message, where the chat template leaves tools out"""
    max_turns: Annotated[int, Field(ge=1)] = 8
    """maximum turns of an episode

    A turn is one generation of the policy and the observation that follows."""
    max_invalid_actions: Annotated[int, Field(ge=1)] = 3
    """the episode ends after N turns that cannot be parsed"""
    max_calls_per_turn: Annotated[int, Field(ge=1)] = 8
    """maximum tool calls in one turn; see --surplus-calls"""
    keep_whole_outputs: bool = False
    """record the full text of tool outputs that the policy sees truncated

    They are kept in episodes/outputs/ of the run folder."""
    surplus_calls: Literal["error", "ignore", "refuse"] = "error"
    """tool calls above the limit of a turn: answer them with an error, ignore them, or refuse all calls of the turn"""
    history_policy: Literal["append", "rerender"] = "append"
    """if the template rewrites history (strips thinking): append to the sampled tokens, or render again in a new segment"""
    context_policy: Annotated[str | None, "NAME"] = None
    """how to shorten long conversations: summarise, drop_old_turns, truncate_old_results or module:policy (default: the environment's choice)

    summarise: the policy writes a summary of the old turns, which is trained like a turn and counts as one."""
    context_policy_args: Annotated[dict[str, Any], "NAME=VALUE"] = field(default_factory=dict)
    """argument of --context-policy, such as keep=1 or above=0.6; repeatable (default: none)"""
    raw_content: bool = False
    """parse control tokens inside prompts and tool outputs as control tokens; unsafe"""
    truncated_episodes: Literal["train", "mask", "drop"] = "train"
    """episodes cut by a limit of turns, tokens or context: train on them, mask them, or drop them

    Masked episodes still count in the baseline of their group."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataSettings:
    """Tasks."""

    prompt_data: Annotated[str | None, "PATH"] = None
    """tasks: a JSONL, JSON, CSV or Parquet file (also .gz), a folder or pattern of them, or a hub id (default: the environment's tasks)

    `PATH@[a:b]` takes the rows from a to b, as a slice in Python."""
    input_key: Annotated[str | None, "NAME"] = None
    """column of the prompt, which is text or messages; a.b is key b inside column a (default: the environment's, usually prompt)"""
    label_key: Annotated[str | None, "NAME"] = None
    """column of the label; a.b is key b inside column a (default: the environment's, usually label)"""
    metadata_key: Annotated[str | None, "NAME"] = None
    """column of the task's metadata, an object (default: all columns but prompt, label and id)"""
    tool_key: Annotated[str, "NAME"] = "tools"
    """column of the task's tools; a.b is key b inside column a"""
    apply_chat_template: bool | None = None
    """render prompts by the model's chat template (default: yes, except prompts that are text, for functions written for slime)

    An environment's prompts are always rendered. A function written for slime gets `sample.prompt` rendered, or as it is in the data."""
    data_source_path: Annotated[str | None, "NAME"] = None
    """which tasks are played next: solve_rate, `module:Class` or `file.py:Class` (default: all tasks in each epoch)

    solve_rate prefers tasks that are solved half of the time, with weights p (1 - p), of each environment by itself. A class is a subclass of
    agentrl.data.data_source.DataSource with get_samples and add_samples. Checkpoints hold its state."""
    rollout_shuffle: bool = True
    """shuffle the tasks in each epoch, by the seed"""
    data_limit: Annotated[int | None, Field(ge=1)] = None
    """use only the first N tasks (default: all)"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GatewaySettings:
    """The HTTP gateway of agents that are separate programs (`AgentEnv`)."""

    gateway_host: Annotated[str, "HOST"] = "127.0.0.1"
    """address on which the gateway listens

    Anyone who reaches the address and knows the key of an episode can use the policy until the episode ends."""
    gateway_port: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    """port on which the gateway listens; 0: any free port"""
    gateway_idle_s: Annotated[float, Field(gt=0)] = 60.0
    """`agentrl gateway`: an episode ends when its key has made no request for this many seconds"""
    gateway_url: Annotated[str | None, "URL"] = None
    """base address that agents are told, such as that of a tunnel into their container (default: that of host and port)"""
