"""An HTTP gateway that speaks the protocols of model providers, so that agents which are programs of their own can be trained.

`AgentEnv` is the environment of such an agent. docs/gateway.md lists what each protocol serves.
"""

from agentrl.gateway.agent_env import AgentEnv, ModelEndpoint

__all__ = ["AgentEnv", "ModelEndpoint"]
