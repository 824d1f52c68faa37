"""An agent as people write one: a tool loop on the OpenAI SDK. Nothing in it knows agentrl, and nothing has to change for training.

OPENAI_BASE_URL=http://… OPENAI_API_KEY=… python agent.py "Which language do people speak in the capital of Peru?"
"""

import json
import sys

from openai import AsyncOpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the World Factbook.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


async def answer(question, search, client, model):
    messages = [{"role": "user", "content": question}]
    while True:
        completion = await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
        choice = completion.choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if choice.finish_reason != "tool_calls":
            return choice.message.content
        for call in choice.message.tool_calls:
            found = search(json.loads(call.function.arguments)["query"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


if __name__ == "__main__":
    import asyncio

    from search import look_up

    print(asyncio.run(answer(sys.argv[1], look_up, AsyncOpenAI(), "policy")))
