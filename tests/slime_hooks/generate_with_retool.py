"""Generate and reward functions in the shape of slime's retool example: code in tags, its output as an observation, a dict as reward."""

import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def execute_predictions(prediction):
    code = re.search(r"<code>(.*?)</code>", prediction, re.DOTALL)
    if code:
        return f"\n\n<interpreter>\n{sum(map(int, code[1].split('+')))}\n</interpreter>\n\n", False
    return "", True


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = f"<|im_start|>system\nWrite code in <code> tags.<|im_end|>\n{sample.prompt}"
    prompt_tokens_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response, response_token_ids, loss_masks, tool_call_count = "", [], [], 0
    for _ in range(4):
        if len(prompt_tokens_ids) + len(response_token_ids) >= args.rollout_max_context_len:
            sample.status = Sample.Status.TRUNCATED
            break
        current_token_ids = prompt_tokens_ids + response_token_ids
        payload = {"input_ids": current_token_ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response += output["text"]
        response_token_ids += ids
        loss_masks += [1] * len(ids)
        if output["meta_info"]["finish_reason"]["type"] == "length":
            break
        next_obs, done = await execute_predictions(output["text"])
        if done:
            break
        tool_call_count += "<interpreter>" in next_obs
        obs = state.tokenizer(next_obs, add_special_tokens=False)["input_ids"]
        response += next_obs
        response_token_ids += obs
        loss_masks += [0] * len(obs)
    sample.tokens = prompt_tokens_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    sample.response = response
    sample.loss_mask = loss_masks
    sample.tool_call_count = tool_call_count
    stopped = output["meta_info"]["finish_reason"]["type"] == "stop"
    sample.status = Sample.Status.COMPLETED if stopped else Sample.Status.TRUNCATED
    return sample


async def reward_func(args, sample, **kwargs):
    answer = re.search(r"Answer: (\d+)", sample.response)
    pred = answer[1] if answer else ""
    score = (1.0 if pred == sample.label else -1.0) + 0.1 * sample.tool_call_count
    return {"score": score, "acc": pred == sample.label, "pred": pred}


async def group_reward(args, samples, **kwargs):
    lengths = [sample.response_length for sample in samples]
    return [float(length == min(lengths)) for length in lengths]


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    """A synchronous rollout function that plays every group by `generate` and sets the rewards itself."""
    import asyncio

    from slime.utils.async_utils import run

    assert not evaluation
    groups = data_source.get_samples(args.rollout_batch_size)

    async def one(sample):
        sample = await generate(args, sample, GenerateState(args).sampling_params.copy())
        sample.reward = await reward_func(args, sample)
        return sample

    async def play():
        return [list(await asyncio.gather(*map(one, group))) for group in groups]

    return run(play())
