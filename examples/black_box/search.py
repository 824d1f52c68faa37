"""search_r1 with an agent that is not ours: agent.py, which speaks to the policy through the gateway.

agentrl train --env examples/black_box/search.py
"""

import sys
from pathlib import Path

from openai import AsyncOpenAI

from agentrl.envs.search_r1 import SearchR1, shared_retriever
from agentrl.gateway import AgentEnv
from agentrl.rewards.answers import em, f1
from agentrl.tools.retrieval import show

sys.path.insert(0, str(Path(__file__).parent))
from agent import answer


def look_up(query):
    (passages,) = shared_retriever("bm25", None, None).search([query], 3)
    return show(passages, max_chars=80) or "nothing found"


class BlackBoxSearch(AgentEnv):
    rewards = (em, f1)
    action_format = "search_r1"
    input_key, label_key = "question", "golden_answers"
    eval_score, eval_groups = "em", ("hops",)

    tasks = SearchR1.tasks
    check_task = SearchR1.check_task

    async def run(self, task, endpoint):
        async with AsyncOpenAI(base_url=endpoint.openai_base_url, api_key=endpoint.api_key) as client:
            return await answer(task.prompt, look_up, client, endpoint.model)
