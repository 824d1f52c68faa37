"""agentrl: reinforcement learning for language-model agents over multi-turn episodes.

    from agentrl import Env, StepResult, Tool, ToolEnv, reward, tool

Runs are started on the command line, or from Python:

    from agentrl import Settings, run_training

Importing agentrl does not import torch.
"""

from agentrl.config.flat_settings import Settings
from agentrl.core.infra_errors import register_infra_error
from agentrl.env import Env, ToolEnv, register_env
from agentrl.errors import AgentRLError, InfraError
from agentrl.reward import Reward, reward
from agentrl.run.api import run_evaluation, run_rollouts, run_sft, run_training
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
    "Settings",
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
    "run_evaluation",
    "run_rollouts",
    "run_sft",
    "run_training",
    "spec_of",
    "tool",
]
