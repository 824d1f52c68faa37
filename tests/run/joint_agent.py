"""The black box of test_joints.py: it asks once and returns the address that it was told."""

import aiohttp

from agentrl import Task, reward
from agentrl.gateway import AgentEnv


@reward
def one(trajectory):
    return 1.0


class Agent(AgentEnv):
    rewards = (one,)

    @classmethod
    def tasks(cls, split):
        return [Task(f"{split}{i}", f"question {i}?") for i in range(4)]

    async def run(self, task, endpoint):
        body = {"model": endpoint.model, "messages": task.messages}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with aiohttp.ClientSession() as session:
            url = f"{endpoint.openai_base_url}/chat/completions"
            async with session.post(url, json=body, headers=headers) as response:
                response.raise_for_status()
        return endpoint.url
