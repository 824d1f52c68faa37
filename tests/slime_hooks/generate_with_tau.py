"""A generate function in the shape of slime's tau-bench example: an agent with tools serves a simulated user, and the reward is the state of a shop.

The prompt of a sample is the index of a task. The conversation is rendered again for each request, and a new sample
is returned, whose status is a text.
"""

import json
import re
from dataclasses import dataclass

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TASKS = [{"order": "71", "wish": "cancelled"}, {"order": "82", "wish": "kept"}]
POLICY = "You serve customers of a shop. Call one tool or none in each turn."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "cancel_order",
            "description": "Cancel an order.",
            "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
        },
    }
]


@dataclass
class Response:
    observation: str
    reward: float
    done: bool


class Shop:
    """The orders, and a user who says what should happen to one of them and then leaves."""

    def __init__(self, task):
        self.task, self.orders = task, {t["order"]: "kept" for t in TASKS}

    def reset(self):
        return f"My order {self.task['order']} should be {self.task['wish']}."

    def step(self, name, arguments):
        if name == "respond":
            return Response("###STOP###", float(self.orders[self.task["order"]] == self.task["wish"]), True)
        self.orders[arguments["order"]] = "cancelled"
        return Response("done", 0.0, False)


def parse(text):
    call = re.search(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    if call is None:
        return "respond", {"content": text}
    given = json.loads(call[1])
    return given["name"], given["arguments"]


def token_delta(tokenizer, messages):
    """The text that the last message adds to the rendered conversation."""
    own = messages[-1]["role"] == "assistant"
    before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=own)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)[len(before) :]


async def interact(args, sample, sampling_params, ids_of_reply):
    assert not args.partial_rollout
    state = GenerateState(args)
    tokenizer = state.tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    index = int(sample.prompt)
    shop = Shop(TASKS[index])
    messages = [{"role": "system", "content": POLICY}, {"role": "user", "content": shop.reset()}]

    def rendered():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=TOOLS)
        return text.replace("You may call one or more functions to assist", "Call at most one function to assist")

    prompt = rendered()
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids, mask, reward, status = [], [], 0.0, "truncated"
    for _ in range(4):
        output = await post(url, {"text": rendered(), "sampling_params": sampling_params})
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            status = "aborted"
            break
        reply = output["text"].removesuffix("<|im_end|>")
        messages.append({"role": "assistant", "content": reply})
        reply_ids, reply_mask = ids_of_reply(tokenizer, token_delta(tokenizer, messages), output)
        ids, mask = ids + reply_ids, mask + reply_mask
        name, arguments = parse(reply)
        response = shop.step(name, arguments)
        role = "user" if name == "respond" else "tool"
        messages.append({"role": role, "content": response.observation})
        between = tokenizer.encode(token_delta(tokenizer, messages), add_special_tokens=False)
        ids, mask = ids + between, mask + [0] * len(between)
        # the assistant's header is part of the next request, so it is part of the sample
        header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        reward = response.reward
        if response.done:
            status = "completed"
            break
        ids, mask = ids + header, mask + [0] * len(header)
    result = Sample(
        index=index,
        prompt=prompt,
        tokens=prompt_ids + ids,
        response="".join(m["content"] for m in messages if m["role"] == "assistant"),
        reward=reward,
        loss_mask=mask,
        status=status,
        metadata={"orders": shop.orders},
    )
    result.response_length = len(mask)
    return result


def sampled_ids(tokenizer, text, output):
    """The ids that the engine sampled; what the template writes after them is not trained."""
    ids = [token for _, token, _ in output["meta_info"]["output_token_logprobs"]]
    rest = tokenizer.encode(text.removeprefix(output["text"]), add_special_tokens=False)
    return ids + rest, [1] * len(ids) + [0] * len(rest)


def ids_of_text(tokenizer, text, output):
    """As in slime's example: the text is tokenised again, and all of it is trained."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids, [1] * len(ids)


async def generate(args, sample, sampling_params):
    return await interact(args, sample, sampling_params, sampled_ids)


async def generate_by_text(args, sample, sampling_params):
    return await interact(args, sample, sampling_params, ids_of_text)
