"""Replay: identical where nothing changed; the right turn, token and cause for every planted fault."""

import asyncio
import dataclasses
import json
import multiprocessing
import os
import shutil
from functools import partial

import pytest
from doubles import FakeGenerator, groups_of, make_runner
from lookup import Search, exact
from replays import (
    Guess,
    Hermes,
    differences,
    hermes_script,
    record,
    replay,
    script,
    span_at,
    tally,
    token_within,
    where,
)

from agentrl import reward, tool
from agentrl.core.sequences import first_difference
from agentrl.errors import InfraError
from agentrl.render import Tokenizer, make_renderer
from agentrl.replay import parallel_replay as parallel
from agentrl.replay.playback import EveryTool
from agentrl.store import Recording
from agentrl.types import FinishReason, Provenance, StopReason


@pytest.mark.parametrize("live", [None, (), EveryTool(), ("search",)], ids=["default", "recorded", "live", "named"])
async def test_a_replay_without_changes_is_identical(tmp_path, tags, hermes, live):
    for env, says, renderer in ((Search, script, tags), (Hermes, hermes_script, hermes)):
        episodes = await record(env, says, renderer, tmp_path / env.__name__, temperature=0.7)
        outcomes = await replay(env, renderer, episodes, live, temperature=0.7)
        assert differences(outcomes) == [None] * 6
    assert "6 episodes replayed: identical" in str(tally(outcomes))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_turns": 2}, StopReason.MAX_TURNS),
        ({"max_response_tokens": 40}, StopReason.MAX_TOKENS),
        ({"context_length": 55}, StopReason.CONTEXT_FULL),
        ({"max_tokens_per_turn": 5}, StopReason.MAX_TOKENS),
    ],
)
async def test_episodes_that_a_limit_ended_are_identical_under_it(tmp_path, tags, limits, reason):
    episodes = await record(Search, script, tags, tmp_path, **limits)
    assert {t.stop_reason for t in episodes} == {reason}
    assert differences(await replay(Search, tags, episodes, **limits)) == [None] * 6


# -- the five planted faults, and tools --------------------------------------------------------------------------------


def with_template(tokenizer_dir, folder, old, new):
    """The same model with one change in its template."""
    shutil.copytree(tokenizer_dir, folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    assert old in config["chat_template"]
    file.write_text(json.dumps({**config, "chat_template": config["chat_template"].replace(old, new)}))
    return Tokenizer.load(folder)


async def test_a_planted_template_fault(tmp_path, tokenizer_dir, tokenizer, hermes):
    """The first generation's header gets a space: the prompt differs, and the token is where the old one goes on with a line break."""
    episodes = await record(Hermes, hermes_script, hermes, tmp_path / "run")
    prompt = with_template(tokenizer_dir, tmp_path / "a", "<|im_start|>assistant\n", "<|im_start|>assistant:\n")
    for d, t in zip(
        differences(await replay(Hermes, make_renderer(prompt, "hermes"), episodes)), episodes, strict=True
    ):
        ids = t.segments[0].ids[: t.turns[0].context_length]
        assert tokenizer.decode(ids[-1:]) == "\n"
        assert where(d) == ("template", -1, len(ids) - 1)
        assert d.then.endswith("assistant\n")
        assert d.today.endswith("assistant:\n")


async def test_a_planted_template_fault_between_turns(tmp_path, tokenizer_dir, tokenizer, hermes):
    """Tool messages end in another way: nothing differs before the first of them."""
    episodes = await record(Hermes, hermes_script, hermes, tmp_path / "run")
    old = "{{ m['content'] }}<|im_end|>\n"
    new = "{{ m['content'] }}{{ '.' if m['role'] == 'tool' else '' }}<|im_end|>\n"
    delta = with_template(tokenizer_dir, tmp_path / "b", old, new)
    for d, t in zip(differences(await replay(Hermes, make_renderer(delta, "hermes"), episodes)), episodes, strict=True):
        after = span_at(t, 0, Provenance.OBSERVATION) + len(tokenizer.encode("capital is in Europe"))
        assert where(d) == ("template", 0, after)
        assert t.segments[0].ids[after] == tokenizer.added["<|im_end|>"]
        assert "Europe.<|im_end|>" in d.today


class Changed:
    """An action format with one change in how it reads."""

    def __init__(self, base, change):
        self.base, self.change = base, change

    def __getattr__(self, name):
        return getattr(self.base, name)

    def parse(self, text, finish_reason, max_calls):
        return self.change(self.base.parse(text, finish_reason, max_calls))


async def test_a_planted_parser_fault(tmp_path, tokenizer, tags):
    """Answers are put in lower case: every episode differs in its last turn, at the answer's first letter."""
    episodes = await record(Search, script, tags, tmp_path)
    lower = lambda a: dataclasses.replace(a, answer=a.answer and a.answer.lower())  # noqa: E731
    broken = make_renderer(tokenizer, "search_r1")
    broken.format = Changed(broken.format, lower)
    for d, t in zip(differences(await replay(Search, broken, episodes)), episodes, strict=True):
        word = t.turns[2].action.answer
        begin = t.turns[2].context_length
        assert where(d) == ("parser", 2, begin + token_within(tokenizer, t.segments[0].ids[begin:], word))
        assert (d.then, d.today) == (word, word.lower())


async def test_a_parser_that_reads_other_calls(tmp_path, tokenizer, tags):
    episodes = await record(Search, script, tags, tmp_path)
    blind = make_renderer(tokenizer, "search_r1")
    blind.format = Changed(blind.format, lambda a: dataclasses.replace(a, calls=a.calls if "think" in a.text else ()))
    for d, t in zip(differences(await replay(Search, blind, episodes)), episodes, strict=True):
        begin = t.turns[1].context_length
        assert d.what == "the calls read from the generation"
        assert where(d) == ("parser", 1, begin + token_within(tokenizer, t.segments[0].ids[begin:], "France"))


class Louder(Search):
    async def step(self, action):
        result = await super().step(action)
        if len(getattr(self, "seen", [])) == 1:
            result = dataclasses.replace(
                result, observation=[{**m, "content": m["content"].upper()} for m in result.observation]
            )
        self.seen = [*getattr(self, "seen", []), action]
        return result


async def test_a_planted_environment_fault(tmp_path, tokenizer, tags):
    """The second observation is shouted: turn 1, at the first token of the observation that differs."""
    episodes = await record(Search, script, tags, tmp_path)
    for d, t in zip(differences(await replay(Louder, tags, episodes)), episodes, strict=True):
        ids = t.segments[0].ids
        begin = span_at(t, 1, Provenance.OBSERVATION)
        quiet, loud = (tokenizer.encode(text) for text in ("France is in Europe", "FRANCE IS IN EUROPE"))
        assert ids[begin : begin + len(quiet)] == quiet
        assert d.what == "the observation"
        assert where(d) == ("env", 1, begin + first_difference(quiet, loud))
        assert (d.then, d.today) == ("France is in Europe", "FRANCE IS IN EUROPE")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"reward": 0.5}, "the step reward"),
        ({"info": {"n": 1}}, "info"),
        ({"state_key": "k"}, "state_key"),
        ({"terminated": True}, "how the episode continues"),
    ],
)
async def test_an_environment_that_answers_otherwise(tmp_path, tags, change, what):
    class Other(Search):
        async def step(self, action):
            return dataclasses.replace(await super().step(action), **change)

    episodes = await record(Search, script, tags, tmp_path)
    for d in differences(await replay(Other, tags, episodes)):
        assert (d.cause, d.turn, d.what) == ("env", 0, what)


class Polite(Search):
    def reset(self, task, *, seed):
        return f"Please: {task.prompt}"


class Quick(Hermes):
    @tool
    def search(self, query: str) -> str:
        """Look something up, quickly."""
        return f"{query} is in Europe"


class Open(Search):
    def state(self):
        return {"open": True}


@pytest.mark.parametrize(
    ("then", "now", "turn", "what"),
    [
        (Search, Polite, -1, "the first observation"),
        (Hermes, Quick, -1, "the tools in the first prompt"),
        (Search, Open, 2, "the final state"),
    ],
)
async def test_another_start_or_end_is_the_environments_doing(tmp_path, tags, hermes, then, now, turn, what):
    says, renderer = (script, tags) if then is Search else (hermes_script, hermes)
    episodes = await record(then, says, renderer, tmp_path)
    found = differences(await replay(now, renderer, episodes))
    assert {(d.cause, d.turn, d.what) for d in found} == {("env", turn, what)}


async def test_a_planted_reward_fault(tmp_path, tags):
    """The reward becomes generous: the episodes whose value changes differ, at their last token."""

    @reward(name="exact")
    def generous(trajectory):
        return 1.0

    episodes = await record(Search, script, tags, tmp_path)
    outcomes = await replay(Search, tags, episodes, rewards=(generous,))
    for d, t in zip(differences(outcomes), episodes, strict=True):
        assert where(d) == ("reward", 2, len(t.segments[0]) - 1)
        assert (d.then, d.today) == ("0.0", "1.0")
    assert "reward             6  component exact" in str(tally(outcomes))


async def test_a_changed_weight_is_a_reward_difference(tmp_path, tags):
    episodes = await record(Search, script, tags, tmp_path)
    assert {
        d.what
        for d in differences(await replay(Search, tags, episodes, rewards=(dataclasses.replace(exact, weight=2.0),)))
    } == {"weights of the components"}


@pytest.mark.parametrize(
    ("then", "now", "turn", "what"),
    [
        ({}, {"max_turns": 2}, 1, "how the episode continues"),
        ({"max_turns": 2}, {}, 1, "how the episode continues"),
        ({}, {"max_tokens_per_turn": 8}, 0, "room for the generation"),
        ({"max_tokens_per_turn": 8}, {}, 0, "room for the generation"),
        ({}, {"max_response_tokens": 22}, 0, "how much of the observation fits"),
    ],
)
async def test_a_planted_limit_fault(tmp_path, tags, then, now, turn, what):
    """The token is the first at which a rollout under today's limit goes another way."""
    episodes = await record(Search, script, tags, tmp_path / "then", **then)
    again = await record(Search, script, tags, tmp_path / "now", **now)
    found = differences(await replay(Search, tags, episodes, **now))
    for d, t, fresh in zip(found, episodes, again, strict=True):
        assert d.what == what
        assert where(d) == ("limit", turn, first_difference(t.segments[0].ids, fresh.segments[0].ids))


async def test_a_surplus_call_is_a_limit_difference_at_the_call(tmp_path, tokenizer, tags):
    episodes = await record(Search, script, tags, tmp_path, max_calls_per_turn=1)
    found = differences(await replay(Search, tags, episodes, max_calls_per_turn=0))
    for d, t in zip(found, episodes, strict=True):
        begin = t.turns[0].context_length
        query = t.turns[0].action.calls[0].arguments["query"]
        assert d.what == "the calls read from the generation"
        assert where(d) == ("limit", 0, begin + token_within(tokenizer, t.segments[0].ids[begin:], query))


async def test_an_observation_cut_at_another_place_is_a_limit_difference(tmp_path, tags):
    class Long(Search):
        @tool
        def search(self, query: str) -> str:
            """Look something up."""
            return f"{query} " * 100

    episodes = await record(Long, script, tags, tmp_path, max_response_tokens=600)
    outcomes = await replay(Long, tags, episodes, max_response_tokens=200)
    assert {(d.cause, d.turn) for d in differences(outcomes)} == {("limit", 0)}


async def test_a_live_tool_with_another_result_is_a_difference(tmp_path, tags, tokenizer):
    class Moved(Search):
        @tool
        def search(self, query: str) -> str:
            """Look something up."""
            return f"{query} is in Asia" if "France" in query else f"{query} is in Europe"

    episodes = await record(Search, script, tags, tmp_path)
    assert differences(await replay(Moved, tags, episodes)) == [None] * 6, "its recorded results are what counts"
    for d, t in zip(differences(await replay(Moved, tags, episodes, EveryTool())), episodes, strict=True):
        assert (d.cause, d.turn, d.what) == ("tool result", 1, "content of result 0 (search)")
        assert tokenizer.decode(t.segments[0].ids[: d.token]).rstrip().endswith("France is in")


async def test_an_environment_that_its_tools_change_is_identical_because_they_are_called_then(tmp_path, tags):
    class Later(Guess):
        async def step(self, action):
            result = await super().step(action)
            return dataclasses.replace(result, info={"late": True} if result.terminated else {})

    episodes = await record(Guess, script, tags, tmp_path)
    assert {len(t.turns) for t in episodes} == {2}
    assert differences(await replay(Guess, tags, episodes, None)) == [None] * 6
    assert {(d.cause, d.turn) for d in differences(await replay(Guess, tags, episodes, ()))} == {("env", 0)}
    found = differences(await replay(Later, tags, episodes, None))
    assert {(d.cause, d.turn, d.what) for d in found} == {("env", 1, "info")}, "the later difference counts"


def test_several_processes_find_the_differences_that_one_finds(tmp_path, tags, monkeypatch):
    """Two chunks, and a process that has one waits until another has the other."""
    monkeypatch.setattr(parallel, "_GROUPS_PER_JOB", 2)
    asyncio.run(record(Search, script, tags, tmp_path / "run"))
    recording = Recording(tmp_path / "run")
    both = multiprocessing.get_context("fork").Barrier(2)

    def runner(split, meet=True):
        if meet:
            both.wait(30)
            (tmp_path / f"process-{os.getpid()}").touch()
        return make_runner(Search, FakeGenerator(tags, []), tags, rewards=Search.rewards, max_turns=2)

    told = []
    found = parallel.replay_entries(parallel.ReplayJob(recording, runner), recording.episodes, 2, told.append)
    alone = parallel.replay_entries(parallel.ReplayJob(recording, partial(runner, meet=False)), recording.episodes, 1)
    pids = {p.name for p in tmp_path.glob("process-*")}
    assert len(pids) == 2
    assert f"process-{os.getpid()}" not in pids
    assert told == [4, 2]
    assert found == alone
    assert {where(o.divergence)[:2] for o in found} == {("limit", 1)}


async def test_another_seed_is_reported(tmp_path, tags):
    episodes = await record(Search, script, tags, tmp_path)
    assert {d.cause for d in differences(await replay(Search, tags, episodes, seed=1))} == {"seed"}


# -- failures and cuts -------------------------------------------------------------------------------------------------


class Fragile(Search):
    @tool(retries=0)
    def search(self, query: str) -> str:
        """Look something up."""
        raise InfraError("down")


class Crash(Search):
    async def step(self, action):
        raise ValueError("boom")


async def one(env, says, tags, **limits):
    """A single episode, played and not written."""
    runner = make_runner(env, says, tags, rewards=env.rewards, **limits)
    t = await runner.run(groups_of(1, 1)[0][0])
    runner.close()
    return t


@pytest.mark.parametrize(("env", "reason"), [(Fragile, StopReason.TOOL_FAILURE), (Crash, StopReason.ENV_FAILURE)])
async def test_failures_are_replayed_as_failures(tmp_path, tags, env, reason):
    t = await one(env, script, tags)
    assert t.stop_reason is reason
    assert differences(await replay(env, tags, [t])) == [None]
    fixed = differences(await replay(Search, tags, [t]))[0]
    if reason is StopReason.ENV_FAILURE:
        assert (fixed.cause, fixed.turn) == ("env", 0)
        assert (fixed.then, fixed.today) == ("env_failure (env step: ValueError)", "continues")


class Slow(Search):
    async def step(self, action):
        if "France" in action.text:
            await asyncio.sleep(60)
        return await super().step(action)


def ends_at(turn):
    return lambda r: RuntimeError("gone") if r.turn == turn else script(r)


@pytest.mark.parametrize(
    ("env", "says", "limits", "reason"),
    [
        (Search, ends_at(0), {}, StopReason.ENGINE_FAILURE),
        (Search, ends_at(1), {}, StopReason.ENGINE_FAILURE),
        (Slow, script, {"episode_timeout_s": 0.3}, StopReason.EPISODE_TIMEOUT),
    ],
    ids=["aborted in the first turn", "aborted in the second", "timed out"],
)
async def test_an_episode_that_was_cut_off_is_compared_up_to_its_end(tags, env, says, limits, reason):
    t = await one(env, says, tags, **limits)
    assert t.stop_reason is reason
    (outcome,) = await replay(Search, tags, [t])
    assert (outcome.divergence, outcome.partial) == (None, True)


async def test_an_empty_generation_and_a_parse_error_are_replayed(tmp_path, tags):
    from agentrl.engine.base import Generation

    says = lambda r: (Generation((), (), FinishReason.STOP), "no tag at all", "<answer>x</answer>")[min(r.turn, 2)]  # noqa: E731
    episodes = await record(Search, says, tags, tmp_path)
    assert differences(await replay(Search, tags, episodes)) == [None] * 6


@reward(group=True)
def rank(trajectories):
    return [float(i) for i, _ in enumerate(trajectories)]


class Ranked(Search):
    rewards = (exact, rank)


async def test_group_rewards_are_compared_where_the_group_is_complete(tmp_path, tags):
    @reward(group=True, name="rank")
    def reverse(trajectories):
        return [-float(i) for i, _ in enumerate(trajectories)]

    episodes = await record(Ranked, script, tags, tmp_path)
    assert differences(await replay(Ranked, tags, episodes)) == [None] * 6
    found = differences(await replay(Ranked, tags, episodes, rewards=(exact, reverse)))
    assert [d and (d.cause, d.what) for d in found] == [None, ("reward", "component rank")] * 3
    alone = await replay(Ranked, tags, [t for t in episodes if t.index == 1], rewards=(exact, reverse))
    assert differences(alone) == [None] or alone[0].divergence.cause == "reward"


async def test_a_group_reward_that_fails_in_the_replay_is_a_difference_in_every_member(tmp_path, tags):
    @reward(group=True, name="rank")
    def broken(trajectories):
        raise ValueError("no ranks")

    episodes = await record(Ranked, script, tags, tmp_path)
    found = differences(await replay(Ranked, tags, episodes, rewards=(exact, broken)))
    assert [(d.cause, d.today) for d in found] == [("reward", "reward_failure (reward rank: ValueError)")] * 6


async def test_terminal_escapes_of_a_tool_show_as_text(tmp_path, tags):
    class Rude(Search):
        @tool
        def search(self, query: str) -> str:
            """Look something up."""
            return "\x1b[31mred\x07"

    episodes = await record(Rude, script, tags, tmp_path)
    outcomes = await replay(Search, tags, episodes, EveryTool())
    text = str(tally(outcomes))
    assert "tool result" in text
    assert "\x1b" not in text
    assert "\x07" not in text
