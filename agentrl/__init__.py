"""agentrl: reinforcement learning for language-model agents over multi-turn episodes.

    from agentrl import Env, StepResult, Tool, ToolEnv, reward, tool

Importing agentrl does not import torch.
"""

from agentrl.core.infra_errors import register_infra_error
from agentrl.env import Env, ToolEnv, register_env
from agentrl.errors import AgentRLError, InfraError
from agentrl.reward import Reward, reward
from agentrl.tool import Tool, ToolLimits, ToolSpec, spec_of, tool
from agentrl.train.sample import Sample
from agentrl.types import Action, Observation, StepResult, Task, Trajectory

__version__ = "0.1.0"

__all__ = [
    "Action",
    "AgentRLError",
    "Env",
    "InfraError",
    "Observation",
    "Reward",
    "Sample",
    "StepResult",
    "Task",
    "Tool",
    "ToolEnv",
    "ToolLimits",
    "ToolSpec",
    "Trajectory",
    "register_env",
    "register_infra_error",
    "reward",
    "spec_of",
    "tool",
]
