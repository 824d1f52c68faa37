"""Clients that others wrote play episodes with tools; every record keeps the laws and replays."""

import json
import sys

import pytest
from doubles import call
from gateway_agents import NotingGenerator, play_agent

from agentrl.gateway import AgentEnv
from agentrl.types import StopReason

SCRIPT = [call("search", query="Swiss capital", limit=2), call("search", query="Bern"), "Bern"]
PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["query"],
}
FUNCTION = {"name": "search", "description": "Look something up.", "parameters": PARAMETERS}
THOUGHTFUL = ["<think>first</think>" + SCRIPT[0], SCRIPT[1], "<think>known</think>Bern"]


def search(query: str, limit: int = 3) -> str:
    return f"{limit} results about {query}"


async def check(env, renderer, script=SCRIPT, **more):
    """The episode of a client: a tool loop of three turns in one segment."""
    t = await play_agent(env, NotingGenerator(renderer, script), renderer, context_length=60000, **more)
    assert (t.stop_reason, t.cause, t.detail) == (StopReason.TERMINATED, None, None)
    assert [[c.name for c in turn.action.calls] for turn in t.turns] == [["search"], ["search"], []]
    assert [r.content for turn in t.turns for r in turn.action.results] == [
        "2 results about Swiss capital",
        "3 results about Bern",
    ]
    assert (len(t.segments), t.state["gateway"]["counts"].keys() - {"token counts"}) == (1, set())
    assert t.state["result"] == "Bern"
    return t


# -- the SDKs ------------------------------------------------------------------------------------------------------------


def openai_client(endpoint, *, sync=False):
    import openai

    kind = openai.OpenAI if sync else openai.AsyncOpenAI
    return kind(base_url=endpoint.openai_base_url, api_key=endpoint.api_key)


class ChatSync(AgentEnv):
    def run(self, task, endpoint):
        messages = list(task.messages)
        with openai_client(endpoint, sync=True) as client:
            while True:
                answer = client.chat.completions.create(
                    model=endpoint.model, messages=messages, tools=[{"type": "function", "function": FUNCTION}]
                )
                message = answer.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return message.content
                for c in message.tool_calls:
                    found = search(**json.loads(c.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": c.id, "content": found})


class ChatAsyncStream(AgentEnv):
    async def run(self, task, endpoint):
        from openai.lib.streaming.chat import ChatCompletionStreamState

        messages = list(task.messages)
        async with openai_client(endpoint) as client:
            while True:
                state = ChatCompletionStreamState()
                stream = await client.chat.completions.create(
                    model=endpoint.model,
                    messages=messages,
                    tools=[{"type": "function", "function": FUNCTION}],
                    stream=True,
                    stream_options={"include_usage": True},
                )
                async for chunk in stream:
                    state.handle_chunk(chunk)
                completion = state.get_final_completion()
                assert completion.usage.completion_tokens > 0
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return message.content
                for c in message.tool_calls:
                    found = search(**json.loads(c.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": c.id, "content": found})


RESPONSES_TOOL = {"type": "function", "strict": False, **FUNCTION}


class ResponsesSync(AgentEnv):
    def run(self, task, endpoint):
        items = [{"role": "user", "content": task.prompt}]
        with openai_client(endpoint, sync=True) as client:
            while True:
                answer = client.responses.create(model=endpoint.model, input=items, tools=[RESPONSES_TOOL], store=False)
                items += answer.output
                calls = [i for i in answer.output if i.type == "function_call"]
                if not calls:
                    return answer.output_text
                for c in calls:
                    found = search(**json.loads(c.arguments))
                    items.append({"type": "function_call_output", "call_id": c.call_id, "output": found})


class ResponsesAsyncStream(AgentEnv):
    async def run(self, task, endpoint):
        items = [{"role": "user", "content": task.prompt}]
        async with openai_client(endpoint) as client:
            while True:
                async with client.responses.stream(
                    model=endpoint.model, input=items, tools=[RESPONSES_TOOL], store=False
                ) as stream:
                    kinds = [event.type async for event in stream]
                    answer = await stream.get_final_response()
                assert kinds[0] == "response.created"
                items += [i.model_dump(exclude_none=True) for i in answer.output]
                calls = [i for i in answer.output if i.type == "function_call"]
                if not calls:
                    return answer.output_text
                for c in calls:
                    found = search(**json.loads(c.arguments))
                    items.append({"type": "function_call_output", "call_id": c.call_id, "output": found})


ANTHROPIC_TOOL = {"name": "search", "description": "Look something up.", "input_schema": PARAMETERS}


def anthropic_results(message):
    return [
        {"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": search(**b.input)}]}
        for b in message.content
        if b.type == "tool_use"
    ]


class AnthropicSync(AgentEnv):
    def run(self, task, endpoint):
        import anthropic

        messages = [{"role": "user", "content": task.prompt}]
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        with anthropic.Anthropic(base_url=endpoint.url, api_key=endpoint.api_key) as client:
            asked = {"model": endpoint.model, "system": system, "tools": [ANTHROPIC_TOOL]}
            counted = client.messages.count_tokens(messages=messages, **asked)
            while True:
                message = client.messages.create(max_tokens=500, messages=messages, **asked)
                if len(messages) == 1:
                    assert message.usage.input_tokens == counted.input_tokens
                messages.append({"role": "assistant", "content": message.content})
                if message.stop_reason != "tool_use":
                    return message.content[-1].text
                messages.append({"role": "user", "content": anthropic_results(message)})


class AnthropicAsyncStream(AgentEnv):
    async def run(self, task, endpoint):
        import anthropic

        messages = [{"role": "user", "content": task.prompt}]
        async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.api_key) as client:
            while True:
                async with client.messages.stream(
                    model=endpoint.model, max_tokens=500, messages=messages, tools=[ANTHROPIC_TOOL]
                ) as stream:
                    message = await stream.get_final_message()
                messages.append({"role": "assistant", "content": message.content})
                if message.stop_reason != "tool_use":
                    return message.content[-1].text
                messages.append({"role": "user", "content": anthropic_results(message)})


SDKS = [ChatSync, ChatAsyncStream, ResponsesSync, ResponsesAsyncStream, AnthropicSync, AnthropicAsyncStream]


@pytest.mark.parametrize("script", [SCRIPT, THOUGHTFUL], ids=["plain", "thoughtful"])
@pytest.mark.parametrize("sdk", SDKS, ids=lambda c: c.__name__)
async def test_an_sdk_plays_with_tools(sdk, script, hermes):
    t = await check(sdk, hermes, script)
    assert {turn.info["request"]["protocol"] for turn in t.turns} <= {"chat", "responses", "messages"}


async def test_an_sdk_repeats_a_request_and_reads_errors_as_its_own(hermes):
    import anthropic
    import openai

    class Errors(AgentEnv):
        async def run(self, task, endpoint):
            async with openai_client(endpoint) as client:
                with pytest.raises(openai.NotFoundError, match="gpt-4o"):
                    await client.chat.completions.create(model="gpt-4o", messages=task.messages)
                with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                    await client.responses.create(model="policy", input="x", previous_response_id="resp_0")
                with pytest.raises(openai.AuthenticationError):
                    await client.with_options(api_key="wrong").models.list()
                assert [m.id async for m in client.models.list()] == ["policy", "side"]
                await client.chat.completions.create(model="policy", messages=task.messages)
            async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.api_key) as client:
                with pytest.raises(anthropic.NotFoundError, match="claude"):
                    await client.messages.create(model="claude", max_tokens=5, messages=task.messages)
                prefill = [*task.messages, {"role": "assistant", "content": "Is"}]
                with pytest.raises(anthropic.BadRequestError, match="prefill"):
                    await client.messages.create(model="policy", max_tokens=5, messages=prefill)
            return "Bern"

    t = await play_agent(Errors, ["x"], hermes)
    assert (t.stop_reason, len(t.turns)) == (StopReason.TERMINATED, 1)


# -- frameworks ----------------------------------------------------------------------------------------------------------


class OpenAIAgents(AgentEnv):
    """openai-agents over the protocol that its setting names."""

    protocol = "responses"

    async def run(self, task, endpoint):
        import agents

        agents.set_tracing_disabled(True)
        kind = agents.OpenAIResponsesModel if self.protocol == "responses" else agents.OpenAIChatCompletionsModel
        async with openai_client(endpoint) as client:
            model = kind(model=endpoint.model, openai_client=client)
            tool = agents.function_tool(search, strict_mode=False)
            agent = agents.Agent(name="a", instructions="Answer briefly.", model=model, tools=[tool])
            return (await agents.Runner.run(agent, task.prompt)).final_output


class OpenAIAgentsChat(OpenAIAgents):
    protocol = "chat"


class LangGraph(AgentEnv):
    """A graph of langgraph with a node for the model and one for the tools."""

    async def run(self, task, endpoint):
        from operator import add
        from typing import Annotated, TypedDict

        from langgraph.graph import END, START, StateGraph

        class State(TypedDict):
            messages: Annotated[list, add]

        async with openai_client(endpoint) as client:

            async def model(state):
                answer = await client.chat.completions.create(
                    model=endpoint.model,
                    messages=state["messages"],
                    tools=[{"type": "function", "function": FUNCTION}],
                )
                return {"messages": [answer.choices[0].message.model_dump(exclude_none=True)]}

            async def tools(state):
                calls = state["messages"][-1]["tool_calls"]
                found = [search(**json.loads(c["function"]["arguments"])) for c in calls]
                return {
                    "messages": [
                        {"role": "tool", "tool_call_id": c["id"], "content": f}
                        for c, f in zip(calls, found, strict=True)
                    ]
                }

            graph = StateGraph(State)
            graph.add_node("model", model)
            graph.add_node("tools", tools)
            graph.add_edge(START, "model")
            graph.add_edge("tools", "model")
            graph.add_conditional_edges("model", lambda s: "tools" if s["messages"][-1].get("tool_calls") else END)
            end = await graph.compile().ainvoke({"messages": list(task.messages)})
            return end["messages"][-1]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("framework", [OpenAIAgents, OpenAIAgentsChat, LangGraph], ids=lambda c: c.__name__)
async def test_a_framework_plays_with_tools(framework, hermes):
    await check(framework, hermes)


@pytest.mark.slow
async def test_smolagents_plays_with_tools(hermes):
    class Smol(AgentEnv):
        def run(self, task, endpoint):
            import smolagents

            @smolagents.tool
            def search(query: str) -> str:
                """Look something up.

                Args:
                    query: what to look for
                """
                return f"results about {query}"

            model = smolagents.OpenAIModel(
                model_id=endpoint.model, api_base=endpoint.openai_base_url, api_key=endpoint.api_key
            )
            agent = smolagents.ToolCallingAgent(tools=[search], model=model, verbosity_level=0)
            return agent.run(task.prompt)

    script = [call("search", query="Swiss capital"), call("final_answer", answer="Bern")]
    t = await play_agent(Smol, NotingGenerator(hermes, script), hermes, context_length=60000)
    assert (t.stop_reason, t.state["result"], len(t.turns)) == (StopReason.TERMINATED, "Bern", 2)


@pytest.mark.slow
async def test_mini_swe_agent_edits_a_file_as_a_command(hermes, tmp_path):
    """A coding agent from a registry, started as users start it; its prompt fits the scripted engine's context."""

    class Mini(AgentEnv):
        command = (
            sys.executable,
            "-m",
            "minisweagent.run.mini",
            *("--yolo", "--exit-immediately", "--model", "openai/policy", "--task", "{prompt}", "--output", "out.json"),
        )
        environ = {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path),
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        files = ("hello.txt",)

    script = [
        call("bash", command="echo Hello > hello.txt && cat hello.txt"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    t = await play_agent(Mini, NotingGenerator(hermes, script), hermes, context_length=60000, max_response_tokens=20000)
    assert (t.stop_reason, t.state["exit_status"]) == (StopReason.TERMINATED, 0), t.state
    assert t.state["files"] == {"hello.txt": "Hello\n"}
    assert len(t.turns) == 2
