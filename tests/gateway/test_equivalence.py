"""A black box gives what the native environment gives; random clients keep the laws; a changed record is found by its replay."""

import asyncio
import json
from dataclasses import replace
from random import Random

import pytest
from doubles import call, make_runner, play
from echo import Search, is_paris
from gateway_agents import (
    SEARCH,
    Client,
    NotingGenerator,
    agent_class,
    message_of,
    play_agent,
    result,
    system,
    user,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_examples import examples

from agentrl.gateway.context_plan import ContextPlanner
from agentrl.gateway.driver import GatewayDriver
from agentrl.replay.fork import fork
from agentrl.replay.replayer import replay_group
from agentrl.store.episode_record import decode, encode, from_record, to_record
from agentrl.train.sample import to_samples
from agentrl.types import EpisodeSpec, Observation, StopReason, Task

ASK = user("What is the capital of France?")


async def search_loop(client):
    """The agent of the native environment `Search`, as a program of its own."""
    messages = [ASK]
    while True:
        answer = await client.chat(messages, tools=[SEARCH])
        messages.append(message_of(answer))
        if answer["finish"] != "tool_calls":
            return
        for c in answer["tool_calls"]:
            messages.append(result(c, f"about {json.loads(c['function']['arguments'])['query']}"))


@pytest.mark.parametrize("limits", [{}, {"max_turns": 2}, {"max_tokens_per_turn": 9}, {"max_response_tokens": 40}])
@pytest.mark.parametrize("form", ["tags", "hermes"])
async def test_a_black_box_trains_the_samples_of_the_native_environment(form, limits, request):
    renderer = request.getfixturevalue(form)

    class Native(Search):
        action_format = renderer.format.name

    if form == "tags":
        script = ["<search>capital</search>", "<think>hm</think><search>France</search>", "<answer>Paris</answer>"]
    else:
        script = [call("search", query="capital"), call("search", query="France"), "<answer>Paris</answer>"]
    env = agent_class(search_loop, rewards=(is_paris,), action_format=renderer.format.name)
    black = await play_agent(env, NotingGenerator(renderer, script), renderer, rewards=[is_paris], **limits)
    native = await play(Native, NotingGenerator(renderer, script), renderer, rewards=[is_paris], **limits)
    if form == "tags":  # else the prompts differ: the schema of the native tool has a description
        assert [s.ids for s in black.segments] == [s.ids for s in native.segments]
        assert [vars_of(s) for s in to_samples(black)] == [vars_of(s) for s in to_samples(native)]
    assert (black.score, black.answer, black.sampled_tokens) == (native.score, native.answer, native.sampled_tokens)
    assert [t.seed for t in black.turns] == [t.seed for t in native.turns]
    assert [t.action.calls for t in black.turns] == [t.action.calls for t in native.turns]
    assert black.stop_reason is native.stop_reason


def vars_of(sample):
    kept = "tokens response_length loss_mask rollout_log_probs reward status policy_versions provenance turn_of temperature"
    return {k: getattr(sample, k) for k in kept.split()}


# -- random clients --------------------------------------------------------------------------------------------------------


def random_script(request):
    """Texts, calls, thoughts, broken calls and odd ids."""
    r = request.random
    text = r.choice(["yes", " no ", "a\n\nb", call("search", query="é"), call("search", query="x") * 2, "<tool_call>{"])
    thought = r.choice(["", "<think>t</think>"])
    return r.choice([thought + text, [r.randrange(3, 380) for _ in range(r.randrange(1, 6))]])


async def random_client(client: Client, r: Random) -> None:
    """Requests that begin, continue, branch, rewrite, repeat, cut and ask for several choices, some at the same time."""
    known = [[ASK]]

    async def one(seed: int) -> None:
        r = Random(seed)
        messages = list(r.choice(known))
        kind = r.randrange(8)
        if kind == 0:
            messages = [system(f"agent {r.randrange(3)}"), user("begin")]
        elif kind == 1 and len(messages) > 2:
            messages = messages[: r.randrange(1, len(messages))]
        elif kind == 2 and len(messages) > 1:
            messages = [system(r.choice("ab")), *[m for m in messages if m["role"] != "system"]]
        elif kind == 3:
            messages = [dict(reversed(m.items())) for m in messages]
        if messages[-1]["role"] == "assistant":
            calls = messages[-1].get("tool_calls", ())
            messages += [result(c, r.choice(["", "found", "x" * 50])) for c in calls] or [user(r.choice("pqr"))]
        more = {"tools": [SEARCH]} if r.random() < 0.8 else {}
        more |= {"n": 2} if r.random() < 0.2 else {}
        more |= {"max_tokens": r.randrange(1, 4)} if r.random() < 0.2 else {}
        headers = {"x-stainless-retry-count": "1"} if r.random() < 0.2 else {}
        body = {"model": "policy", "messages": messages, **more}
        status, answer = await client.post("/v1/chat/completions", body, **headers)
        if status == 200:
            known.extend([*messages, message_of(c["message"])] for c in answer["choices"])
        else:
            assert status == 400, answer

    for _ in range(r.randrange(2, 7)):
        await asyncio.gather(*(one(r.randrange(1 << 30)) for _ in range(r.choice([1, 1, 2, 4]))))


@examples(25)
@given(seed=st.integers(0, 1 << 30))
def test_random_request_graphs_keep_the_laws(hermes, seed):
    asyncio.run(
        play_agent(lambda c: random_client(c, Random(seed)), random_script, hermes, max_turns=12, context_length=1500)
    )


@pytest.mark.parametrize("seed", range(3))
async def test_a_replay_repeats_each_request_as_the_client_wrote_it(seed, hermes, monkeypatch):
    """Also what it changed in the history without another meaning, in this request or in an earlier one."""
    made, plan = [], ContextPlanner.plan
    monkeypatch.setattr(
        ContextPlanner, "plan", lambda self, r: made.append(json.dumps(r.messages, sort_keys=True)) or plan(self, r)
    )

    async def agent(client):
        r, messages = Random(seed), [ASK]
        for number in range(6):
            if r.random() < 0.5:
                at = r.randrange(len(messages))
                messages[at] = {**messages[at], "content": messages[at]["content"] + " "}
            messages += [message_of(await client.chat(messages)), user(f"more {number}")]

    t = await play_agent(agent, ["one", "two"], hermes, max_turns=9)
    assert (len(t.turns), len(t.segments)) == (6, 1)
    assert any(turn.info["request"].get("changed") for turn in t.turns)
    assert made[:6] == made[6:]


# -- replay and fork -----------------------------------------------------------------------------------------------------


async def played(renderer):
    env = agent_class(search_loop)
    engine = NotingGenerator(
        renderer, lambda r: call("search", query=str(r.random.random())) if len(r.ids) < 240 else "Rome"
    )
    driver = GatewayDriver(env)
    runner = make_runner(env, engine, renderer, driver=driver)
    t = await runner.run(EpisodeSpec(Task("t", "x"), 0, 0))
    return runner, from_record(decode(encode(to_record(t)), "test"))


async def test_a_changed_record_is_found_at_its_turn(hermes):
    runner, t = await played(hermes)
    message = {**t.turns[0].observation.messages[0], "content": "something else"}
    changed = replace(t.turns[0], observation=Observation((message,)))
    (outcome,) = await replay_group(runner, [replace(t, turns=(changed, *t.turns[1:]))])
    assert (outcome.divergence.cause, outcome.divergence.turn) == ("template", 0)
    (outcome,) = await replay_group(runner, [replace(t, stop_reason=StopReason.MAX_TURNS)])
    assert outcome.divergence is None  # an end that the agent chose is the record's
    await runner.driver.close()


async def test_a_fork_runs_the_agent_again_up_to_its_turn(hermes):
    runner, t = await played(hermes)
    same, other = await fork(runner, t, 1, seeds=(0, 5))
    assert (same.differs_at, other.differs_at is not None) == (None, True)
    assert other.trajectory.turns[0].action.calls == t.turns[0].action.calls
    assert other.trajectory.turns[1].action.calls != t.turns[1].action.calls
    await runner.driver.close()
