"""Summaries by the policy itself: turns that the environment does not see, trained once, within every limit, equal in a replay."""

import asyncio
import dataclasses
import pickle
from collections import Counter

import pytest
from doubles import EMBEDDED, FakeGenerator, call, end, groups_of, make_runner, play
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import MORE
from local_models import local

from agentrl import Env, StepResult, ToolEnv, reward, tool
from agentrl.engine.base import SamplingParams
from agentrl.errors import ConfigError, ContractError
from agentrl.render import (
    DropOldTurns,
    Summarise,
    SummariseByPolicy,
    SummaryRequest,
    Tokenizer,
    TruncateOldResults,
    make_renderer,
)
from agentrl.render.context_policy import resolve_context_policy
from agentrl.replay.branch import play_branch
from agentrl.replay.fork import fork
from agentrl.replay.replayer import replay_group
from agentrl.rollout.branching import BranchRule
from agentrl.rollout.failures import CauseTable
from agentrl.run.metrics import rollout_metrics, summary_metrics
from agentrl.store import exactness_violations, to_record
from agentrl.store.episode_record import encode, from_record
from agentrl.train.advantage import compare, group_advantages
from agentrl.train.sample import to_samples
from agentrl.types import EpisodeSpec, Group, Observation, Provenance, StopReason

ASK = "SUM UP"
LIMITS = {"context_length": 460, "max_response_tokens": 4096, "max_turns": 12}
POLICY = SummariseByPolicy(keep=1, above=0.5, max_tokens=60, instruction=ASK)


@reward
def exact(trajectory):
    return float(trajectory.answer == trajectory.label)


class Long(ToolEnv):
    """Searches with long results, then an answer. Counts its steps."""

    action_format = "hermes"
    rewards = (exact,)
    context_policy = POLICY
    steps = 0

    @tool
    def search(self, query: str) -> str:
        """Look something up."""
        return f"{query}: " + "the capital of France is Paris. " * 5

    async def step(self, action):
        self.steps += 1
        return dataclasses.replace(await super().step(action), state_key=str(self.steps))

    def state(self):
        return {"steps": self.steps}


def asked(renderer, request):
    """Whether a request is for a summary: the instruction is its last message."""
    return ASK in renderer.tokenizer.decode(list(request.ids[-16:]))


def script(renderer, summary="Paris is the capital.", searches=5):
    """Searches, and a summary where one is asked for, which is numbered by the turn."""
    done = Counter()

    def answer(request):
        if asked(renderer, request):
            return summary if summary != "Paris is the capital." else f"Note {request.turn}: Paris."
        done[request.session] += 1
        number = done[request.session]
        return call("search", query=f"q{number}") if number <= searches else "<answer>Paris</answer>"

    return answer


def sampled(trajectory):
    return [i for s in trajectory.segments for p in s.spans if p.provenance is Provenance.SAMPLED for i in p.ids]


def trained(trajectory):
    pairs = [
        (i, m)
        for s in to_samples(trajectory)
        for i, m in zip(s.tokens[len(s.tokens) - s.response_length :], s.loss_mask, strict=True)
    ]
    return [i for i, mask in pairs if mask]


def summaries(trajectory):
    return [t for t in trajectory.turns if t.summary is not None]


async def replayed(env, renderer, members, **more):
    runner = make_runner(env, [], renderer, rewards=env.rewards, **{**LIMITS, **more})
    try:
        return [o.divergence for o in await replay_group(runner, members)]
    finally:
        end(runner)


async def test_the_policy_writes_summaries_and_the_episode_goes_on(hermes):
    t = await play(Long, FakeGenerator(hermes, script(hermes)), hermes, rewards=Long.rewards, **LIMITS)
    assert (t.stop_reason, t.score, t.answer) == (StopReason.TERMINATED, 1.0, "Paris")
    wrote = summaries(t)
    assert len(wrote) > 1, "several in one episode"
    assert t.state["steps"] == len(t.turns) - len(wrote) == 6, "the environment does not see them"
    assert [u.index for u in t.turns] == list(range(len(t.turns)))
    assert exactness_violations([t]) == 0
    assert trained(t) == sampled(t)
    for u in wrote:
        before, text = t.segments[u.segment], f"Note {u.index}: Paris."
        assert u.action.text == text
        assert hermes.tokenizer.decode(before.ids[: u.context_length]).count(ASK) == 1
        assert (before.spans[-1].turn, before.spans[-1].provenance) == (u.index, Provenance.SAMPLED)
        (prompt, *_) = t.segments[u.segment + 1].spans
        assert (prompt.provenance, prompt.turn) == (Provenance.PROMPT, u.index)
        shown = hermes.tokenizer.decode(list(prompt.ids))
        assert shown.count("Note ") == 1, "the summary before is replaced"
        assert text in shown
        assert ASK not in shown
        assert [m["role"] for m in u.context] == ["user", "assistant", "tool"]
        assert u.info["new_segment"] == "a summary by the policy"
    assert encode(to_record(from_record(to_record(t)))) == encode(to_record(t))
    assert pickle.loads(pickle.dumps(t)) == t, "it crosses from a runner process"


async def test_what_a_policy_that_asks_nothing_records_is_as_before(hermes):
    plain = type("Plain", (Long,), {"context_policy": None})
    t = await play(plain, FakeGenerator(hermes, script(hermes, searches=1)), hermes, **LIMITS)
    assert all("summary" not in turn for turn in to_record(t)["turns"])


@pytest.mark.parametrize(
    ("summary", "errors", "note"),
    [
        ("long " * 200, [], "long long"),
        ("", ["empty"], None),
        ("<think>hm</think>", ["empty"], None),
        ("<think>hm</think>Known: Paris.", [], "Known: Paris."),
        (call("search", query="again"), ["call"], "again"),
        ("<answer>Rome</answer>", [], "Rome"),
    ],
)
async def test_summaries_with_a_flaw_follow_their_rule_and_are_counted(hermes, summary, errors, note):
    t = await play(Long, FakeGenerator(hermes, script(hermes, summary)), hermes, rewards=Long.rewards, **LIMITS)
    assert (t.stop_reason, t.answer, t.state["steps"]) == (StopReason.TERMINATED, "Paris", 6)
    wrote = summaries(t)
    assert [[e.kind for e in u.action.errors] for u in wrote] == [errors] * len(wrote)
    assert all(not u.action.calls and u.action.answer is None for u in wrote)
    contents = [u.context[0]["content"] for u in wrote]
    assert all(note in c if note else c == "What is the capital of France?" for c in contents)
    assert all("hm" not in c for c in contents), "thinking is not part of the summary"
    tokens = sum(len(s.ids) for g in t.segments for s in g.spans if s.turn in {u.index for u in wrote} and s.log_probs)
    cut = len(wrote) if summary.startswith("long") else 0
    assert summary_metrics([t]) == {
        "summaries": len(wrote),
        "summary_tokens": tokens,
        "summaries_cut": cut,
        "summaries_empty": len(wrote) * (errors == ["empty"]),
        "summaries_with_calls": len(wrote) * (errors == ["call"]),
    }
    metrics = rollout_metrics([Group(0, t.task, (t,))], CauseTable(), 0)
    assert metrics["invalid_turns"] == 0, "a summary is not an action"
    assert trained(t) == sampled(t)


async def test_an_empty_summary_leaves_the_one_before(hermes):
    texts = iter(["First: Paris.", "", "", ""])
    answer = script(hermes)
    t = await play(
        Long, FakeGenerator(hermes, lambda r: next(texts) if asked(hermes, r) else answer(r)), hermes, **LIMITS
    )
    assert len(summaries(t)) > 1
    assert all(u.context[0]["content"].endswith("First: Paris.") for u in summaries(t))


async def test_a_summary_is_a_turn_and_none_is_asked_for_before_no_turn(hermes):
    t = await play(Long, FakeGenerator(hermes, script(hermes)), hermes, **LIMITS)
    first = summaries(t)[0].index
    for most in range(1, len(t.turns)):
        cut = await play(Long, FakeGenerator(hermes, script(hermes)), hermes, **{**LIMITS, "max_turns": most})
        assert len(cut.turns) <= most
        assert cut.turns[-1].summary is None, "a turn can follow each summary"
        assert bool(summaries(cut)) == (most > first + 1)


async def test_its_own_bound_and_that_of_turns_hold_for_a_summary(hermes):
    for bounds, most in (({}, 60), ({"max_tokens_per_turn": 40}, 40)):
        engine = FakeGenerator(hermes, script(hermes))
        await play(Long, engine, hermes, **LIMITS, **bounds)
        rooms = [r.sampling.max_new_tokens for r in engine.requests if asked(hermes, r)]
        assert rooms
        assert max(rooms) == most


async def test_a_timeout_during_a_summary_ends_the_episode(hermes):
    answer = script(hermes)
    never = asyncio.Event()

    async def hang():
        await never.wait()

    engine = FakeGenerator(hermes, lambda r: hang() if asked(hermes, r) else answer(r))
    t = await play(Long, engine, hermes, **LIMITS, episode_timeout_s=0.3)
    assert (t.stop_reason, t.cause) == (StopReason.EPISODE_TIMEOUT, "during summary")


@settings(max_examples=60 * MORE)
@given(data=st.data())
def test_no_token_is_lost_or_trained_twice_and_no_context_exceeds_its_limit(hermes, data):
    keep, most = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 80))
    above, context = data.draw(st.sampled_from([0.0, 0.3, 0.6, 0.9])), data.draw(st.integers(260, 700))
    response, turns = data.draw(st.sampled_from([150, 300, 4096])), data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(0, 120), min_size=20, max_size=20))

    class Random(Long):
        context_policy = SummariseByPolicy(keep=keep, above=above, max_tokens=most, instruction=ASK)

        @tool
        def search(self, query: str) -> str:
            """Look something up."""
            return "found " * lengths[len(query) % 20] or "nothing"

    returned = []

    def answer(request):
        size = lengths[request.turn % 20]
        return "note " * (size % 30) if asked(hermes, request) else call("search", query="x" * (size % 40))

    class Noting(FakeGenerator):
        def answer(self, request, reply):
            generation = super().answer(request, reply)
            returned.append((request, generation))
            return generation

    limits = {"context_length": context, "max_response_tokens": response, "max_turns": turns}
    t = asyncio.run(play(Random, Noting(hermes, answer), hermes, rewards=Long.rewards, **limits))
    assert sampled(t) == [i for _, g in returned for i in g.ids], "as the engine returned them, in order"
    assert trained(t) == sampled(t)
    assert exactness_violations([t]) == 0
    assert len(t.turns) == len(returned) <= turns
    first = len(returned[0][0].ids) if returned else 0
    for turn, (request, _) in zip(t.turns, returned, strict=True):
        assert t.segments[turn.segment].ids[: turn.context_length] == list(request.ids)
        assert len(request.ids) + request.sampling.max_new_tokens <= min(context, first + response)
        assert turn.summary is None or request.sampling.max_new_tokens <= most
        assert (turn.summary is not None) == asked(hermes, request)
    assert asyncio.run(replayed(Random, hermes, [t], **limits)) == [None]


async def test_a_replay_equals_the_record_and_names_another_request(hermes):
    t = await play(Long, FakeGenerator(hermes, script(hermes)), hermes, rewards=Long.rewards, **LIMITS)
    assert await replayed(Long, hermes, [t]) == [None]
    at = summaries(t)[0].index - 1
    for change, turn in (
        ({"instruction": "SUM UP now"}, at),
        ({"max_tokens": 61}, at),
        ({"above": 0.95}, at),
        ({"keep": 0}, 0),
    ):
        policy = dataclasses.replace(POLICY, **change)
        (found,) = await replayed(type("Long", (Long,), {"context_policy": policy}), hermes, [t])
        assert (found.cause, found.what, found.turn) == ("env", "the summary that the context policy asks for", turn)
    (found,) = await replayed(type("Long", (Long,), {"context_policy": None}), hermes, [t])
    assert found.turn == at


async def test_an_async_policy_is_not_called_by_a_replay(hermes):
    calls = []

    class Asking(Long):
        async def context_policy(self, view):
            calls.append(view.tokens)
            return SummaryRequest(instruction=ASK, keep=1) if view.share > 0.5 and len(view.turns()) > 1 else None

    t = await play(Asking, FakeGenerator(hermes, script(hermes)), hermes, rewards=Long.rewards, **LIMITS)
    assert summaries(t)
    times = len(calls)
    assert await replayed(Asking, hermes, [t]) == [None]
    assert len(calls) == times


async def test_forks_and_branches_sample_a_summary_again(hermes):
    t = await play(Long, FakeGenerator(hermes, script(hermes)), hermes, rewards=Long.rewards, **LIMITS)
    at = summaries(t)[0].index

    def other(request):
        return "Other: Paris." if asked(hermes, request) else "<answer>Paris</answer>"

    runner = make_runner(Long, FakeGenerator(hermes, other), hermes, rewards=Long.rewards, **LIMITS)
    (forked,) = await fork(runner, t, at)
    (spec,) = BranchRule((at,)).branches(EpisodeSpec(t.task, 0, 0), t)
    branch = await play_branch(runner, spec)
    end(runner)
    for again in (forked.trajectory, branch):
        assert [u.action.text for u in again.turns[:at]] == [u.action.text for u in t.turns[:at]]
        assert again.turns[at].summary == t.turns[at].summary
        assert again.turns[at].action.text == "Other: Paris."
        assert again.score == 1.0
    both = [t, branch]
    tokens = sum(len(trained(x)) for x in both)
    assert tokens == len(sampled(t)) + sum(
        len(s.ids) for g in branch.segments for s in g.spans if s.log_probs and s.turn >= at
    )


class Method(Long):
    """Asks by a method, which a process of its own runs."""

    def context_policy(self, view):
        return SummaryRequest(instruction=ASK, keep=1) if view.share > 0.5 and len(view.turns()) > 1 else None


class Isolated(Long):
    isolation = "process"


class IsolatedMethod(Method):
    isolation = "process"


@pytest.mark.parametrize("env", [Isolated, IsolatedMethod])
async def test_environments_in_processes_of_their_own(hermes, env):
    here = {Isolated: Long, IsolatedMethod: Method}[env]
    t = await play(here, FakeGenerator(hermes, script(hermes)), hermes, **LIMITS)
    other = await play(env, FakeGenerator(hermes, script(hermes)), hermes, **LIMITS)
    assert summaries(t)
    assert (other.segments, [u.summary for u in other.turns]) == (t.segments, [u.summary for u in t.turns])


class Talk(Env):
    """Two speakers in turns; each has a context of its own."""

    action_format = "hermes"
    roles = ("a", "b")
    context_policy = POLICY

    def reset(self, task, *, seed):
        self.said = 0
        return "Begin. " + "word " * 12

    def step(self, action):
        self.said += 1
        other = self.roles[self.said % 2]
        done = self.said == 10
        return StepResult(Observation.of(f"The other said {action.text}. " + "word " * 12, to=other), terminated=done)


async def test_each_of_several_speakers_summarises_its_own_context(hermes):
    def answer(request):
        return f"{request.session[-1]} notes." if asked(hermes, request) else f"{request.session[-1]} speaks"

    t = await play(Talk, FakeGenerator(hermes, answer), hermes, **{**LIMITS, "context_length": 260})
    assert t.stop_reason is StopReason.TERMINATED
    assert {u.agent_id for u in summaries(t)} == {"a", "b"}
    for u in summaries(t):
        assert u.action.text == f"{u.agent_id} notes."
        assert t.segments[u.segment].agent_id == u.agent_id
    assert exactness_violations([t]) == 0
    assert sum(len(trained(t.of_role(r))) for r in t.roles) == len(sampled(t))


async def test_a_summary_is_not_a_step_of_turn_level_estimators(hermes):
    limits = {**LIMITS, "context_length": 4096}
    plain = type("Plain", (Long,), {"context_policy": None})
    with_it = await play(Long, FakeGenerator(hermes, script(hermes)), hermes, rewards=Long.rewards, **LIMITS)
    without = await play(plain, FakeGenerator(hermes, script(hermes)), hermes, rewards=Long.rewards, **limits)
    failed = dataclasses.replace(without, episode_id="2-0", rewards={"exact": 0.0})
    group = [with_it, dataclasses.replace(without, episode_id="1-0"), failed]
    data = compare([group]).data
    first = [data.steps[0][u.index] for u in with_it.turns]
    assert [s for s, u in zip(first, with_it.turns, strict=True) if u.summary is None] == list(range(6))
    for u in summaries(with_it):
        assert first[u.index] == first[u.index + 1]
        assert data.state_keys[0][u.index] == data.state_keys[0][u.index + 1]
    of_step = {}
    from agentrl.train.estimators.base import Options
    from agentrl.train.estimators.turns import gigpo

    values = gigpo(data, Options(gamma=0.5))
    for episode, step, value in zip(data.episode.tolist(), data.step.tolist(), values.tolist(), strict=True):
        of_step.setdefault((episode, step), set()).add(round(value, 9))
    assert all(len(of_step[e, s]) == 1 for e, s in of_step), "a summary has the advantage of the action after it"
    for step in range(6):
        assert of_step[0, step] == of_step[1, step], "and the steps those of an episode without summaries"
    advantages = group_advantages([group])
    assert advantages["0-0"] == pytest.approx(advantages["1-0"])


@pytest.mark.full
async def test_an_episode_of_the_local_engine():
    tokenizer = Tokenizer.load(EMBEDDED)
    renderer = make_renderer(tokenizer, "search_r1")

    class Search(Long):
        action_format = "search_r1"
        context_policy = SummariseByPolicy(keep=1, above=0.2, max_tokens=12, instruction=ASK)

    limits = {"context_length": 400, "max_tokens_per_turn": 40, "max_turns": 8}
    engine = await local(EMBEDDED, decode=tokenizer.decode)
    runner = make_runner(Search, engine, renderer, rewards=Search.rewards, **limits)
    made = [await runner.run(spec) for spec in groups_of(1, 4)[0]]
    wrote = [(t, u) for t in made for u in summaries(t)]
    assert wrote
    assert exactness_violations(made) == 0
    for t, u in wrote:
        (of_it,) = [s for s in t.segments[u.segment].spans if s.turn == u.index and s.log_probs]
        again = await engine.generate(
            t.segments[u.segment].ids[: u.context_length],
            SamplingParams(12, stop=renderer.stop, stop_token_ids=renderer.stop_token_ids, seed=u.seed),
            session="again",
        )
        assert again.ids == of_it.ids
        assert again.log_probs == pytest.approx(of_it.log_probs, abs=1e-4)
    await engine.close()
    end(runner)
    assert await replayed(Search, renderer, made, **limits) == [None] * 4


class Flexible:
    """A context policy that takes any argument."""

    def __init__(self, **options):
        self.options, self.count = options, len(options.get("names", ""))

    def __call__(self, view):
        return None


def test_a_policy_of_ones_own_may_take_any_argument():
    assert resolve_context_policy(f"{__file__}:Flexible", {"keep": 3}).options == {"keep": 3}
    with pytest.raises(ConfigError, match=r"'int' has no len.*give other --context-policy-arg"):
        resolve_context_policy(f"{__file__}:Flexible", {"names": 3})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"keep": -1}, "keep of a summary must be an integer of at least 0"),
        ({"max_tokens": 0}, "max_tokens of a summary must be an integer of at least 1"),
        ({"instruction": " "}, "a summary needs an instruction"),
        ({"above": 1.5}, "above must be a share"),
        ({"abov": 0.5}, "takes no argument 'abov'.*above"),
    ],
)
def test_arguments_that_cannot_work_are_refused(args, message):
    with pytest.raises((ConfigError, ContractError), match=message):
        resolve_context_policy("summarise", args)


@pytest.mark.parametrize("name", ["drop_old_turns", "truncate_old_results"])
@pytest.mark.parametrize(
    "args", [{"keep": -1}, {"keep": 0}, {"keep": "x"}, {"keep": True}, {"above": 1.5}, {"above": "half"}]
)
def test_arguments_that_no_policy_can_use_are_refused(name, args):
    with pytest.raises(ConfigError, match=f"{name}: {next(iter(args))} .*must be"):
        resolve_context_policy(name, args)
    with pytest.raises(ContractError, match="characters of a context policy must be an integer"):
        TruncateOldResults(characters=-1)
    with pytest.raises(ContractError, match=f"{next(iter(args))} .*must be"):
        Summarise(str, **args)


def test_arguments_on_the_command_line():
    with pytest.raises(ConfigError, match="needs an argument 'write'; give --context-policy-arg write=VALUE"):
        resolve_context_policy("agentrl.render.context_policy:Summarise")
    assert resolve_context_policy("summarise", {"keep": 0, "above": 0.5}) == SummariseByPolicy(keep=0, above=0.5)
    assert resolve_context_policy("drop_old_turns", {"keep": 1}) == DropOldTurns(keep=1)
    with pytest.raises(ConfigError, match="needs --context-policy"):
        resolve_context_policy(None, {"keep": 1})
    with pytest.raises(ConfigError, match="not a class"):
        resolve_context_policy("agentrl.render.context_policy:check_rewrite", {"keep": 1})


async def test_a_request_of_a_users_policy_is_checked(hermes):
    class Bad(Long):
        def context_policy(self, view):
            return SummaryRequest(instruction="", keep=1)

    with pytest.raises(ContractError, match="needs an instruction"):
        await play(Bad, FakeGenerator(hermes, script(hermes)), hermes, **LIMITS)
