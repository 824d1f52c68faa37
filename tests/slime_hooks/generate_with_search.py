"""Generate and reward functions in the shape of slime's search-r1 example: several searches in one response, an exact-match reward."""

import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

CONFIGS = {"max_turns": 3, "return_logprob": True}
FACTS = {"france": "Paris is the capital."}


async def execute_predictions(prediction):
    match = re.search(r"<(search|answer)>(.*?)</\1>", prediction, re.DOTALL)
    if match and match[1] == "search":
        found = next((fact for name, fact in FACTS.items() if name in match[2]), "nothing")
        return f"\n\n<information>{found}</information>\n\n", False
    if match:
        return "", True
    return "\nMy previous action is invalid. Let me try again.\n", False


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_text = sample.prompt
    prompt_tokens_ids = state.tokenizer(prompt_text, add_special_tokens=False)["input_ids"]
    response, response_token_ids, loss_mask, rollout_log_probs = "", [], [], []
    for _ in range(CONFIGS["max_turns"]):
        payload = {"text": prompt_text + response, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        cur_response_token_ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        rollout_log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        response += output["text"]
        response_token_ids += cur_response_token_ids
        loss_mask += [1] * len(cur_response_token_ids)
        if output["meta_info"]["finish_reason"]["type"] == "length":
            break
        next_obs, done = await execute_predictions(output["text"])
        if done:
            break
        obs_tokens_ids = state.tokenizer(next_obs, add_special_tokens=False)["input_ids"]
        response += next_obs
        response_token_ids += obs_tokens_ids
        loss_mask += [0] * len(obs_tokens_ids)
        rollout_log_probs += [0.0] * len(obs_tokens_ids)
    sample.tokens = prompt_tokens_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.prompt = prompt_text
    sample.rollout_log_probs = rollout_log_probs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    answer = re.findall(r"<answer>(.*?)</answer>", sample.response)
    return float(bool(answer) and answer[-1].strip() == sample.label["ground_truth"]["target"][0])
