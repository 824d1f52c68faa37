"""The data types: accepted and refused values, and derived properties."""

import copy
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ContractError, InvariantError
from agentrl.types import (
    Action,
    FinishReason,
    Observation,
    ParseError,
    Provenance,
    Segment,
    Span,
    Status,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    count_tokens,
)

LOG_PROB = st.floats(min_value=-50, max_value=0)


def sampled(*ids, log_probs=None, version=0, turn=0):
    return Span(Provenance.SAMPLED, ids, turn, log_probs or (-0.5,) * len(ids), version)


def trajectory(**kw):
    fields = {
        "episode_id": "0-0",
        "group_index": 0,
        "index": 0,
        "attempt": 0,
        "task": Task("t", "What is the capital of Sweden?", "Stockholm"),
        "env": "Quiz",
        "segments": (Segment((Span(Provenance.PROMPT, (1, 2, 3)), sampled(4, 5))),),
        "turns": (),
        "stop_reason": StopReason.TERMINATED,
    }
    return Trajectory(**{**fields, **kw})


def turn(index=0, reward=0.0, answer=None):
    return Turn(index, 0, 3, Action("x", answer=answer), reward=reward)


class TestTask:
    def test_text_is_one_user_message(self):
        assert Task("1", "Hi").messages == [{"role": "user", "content": "Hi"}]

    def test_an_environment_that_edits_its_messages_leaves_the_other_members_of_the_group_alone(self):
        task = Task("1", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}))
        task.messages[0]["content"] += " Answer in French."
        task.messages.pop()
        assert task.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

    def test_a_prompt_with_tool_calls_and_no_content_is_a_valid_first_observation(self):
        calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
        prompt = (
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "5"},
        )
        assert Observation.of(Task("1", prompt).messages).messages == prompt


class TestObservation:
    @pytest.mark.parametrize(
        "value",
        [
            "Hi",
            {"role": "user", "content": "Hi"},
            [{"role": "user", "content": "Hi"}],
            ({"role": "user", "content": "Hi"},),
        ],
    )
    def test_shapes(self, value):
        observation = Observation.of(value)
        assert observation.messages == ({"role": "user", "content": "Hi"},)
        assert Observation.of(observation) is observation

    def test_an_empty_observation_has_no_messages(self):
        assert Observation.of(()) == Observation.of([]) == Observation()

    def test_parts(self):
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image", "image": "sha256:00"}]
        assert Observation.of({"role": "user", "content": parts}).messages[0]["content"] == parts

    @pytest.mark.parametrize(
        "value",
        [
            None,
            5,
            b"",
            b"text",
            {"content": "no role"},
            {"role": "user"},
            {"role": "user", "content": None},
            {"role": "user", "content": b"bytes"},
            {"role": None, "content": "x"},
            ["text in a list"],
            [{"role": "user", "content": "good"}, None],
            ({"role": "user", "content": "a generator"} for _ in range(1)),
        ],
    )
    def test_a_value_that_is_not_an_observation_is_refused_with_its_type(self, value):
        with pytest.raises(ContractError, match=f"found {type(value).__name__}"):
            Observation.of(value)

    def test_the_complaint_is_short_even_if_the_value_is_not(self):
        with pytest.raises(ContractError) as caught:
            Observation.of(["x" * 1_000_000])
        assert len(str(caught.value)) < 400


class TestSpan:
    def test_a_span_without_tokens_is_refused(self):
        with pytest.raises(InvariantError, match="at least one token"):
            Span(Provenance.PROMPT, ())

    @pytest.mark.parametrize("provenance", [p for p in Provenance if p is not Provenance.SAMPLED])
    def test_only_sampled_tokens_have_log_probs_and_versions(self, provenance):
        assert Span(provenance, (1,)).log_probs is None
        with pytest.raises(InvariantError, match=provenance.name):
            Span(provenance, (1,), 0, (-0.5,), 0)
        with pytest.raises(InvariantError, match=provenance.name):
            Span(provenance, (1,), 0, None, 0)

    def test_sampled_tokens_must_have_both(self):
        with pytest.raises(InvariantError):
            Span(Provenance.SAMPLED, (1,), 0, None, 0)
        with pytest.raises(InvariantError):
            Span(Provenance.SAMPLED, (1,), 0, (-0.5,), None)

    @given(st.lists(LOG_PROB, min_size=1, max_size=8), st.integers(1, 8))
    def test_one_log_prob_per_token(self, log_probs, n):
        if len(log_probs) == n:
            assert len(sampled(*range(n), log_probs=tuple(log_probs)).ids) == n
        else:
            with pytest.raises(InvariantError, match=f"{n} tokens has {len(log_probs)}"):
                sampled(*range(n), log_probs=tuple(log_probs))

    @given(
        st.lists(LOG_PROB, max_size=5), st.sampled_from([math.nan, math.inf, -math.inf]), st.lists(LOG_PROB, max_size=5)
    )
    def test_a_log_prob_that_is_not_finite_is_refused(self, before, bad, after):
        log_probs = (*before, bad, *after)
        with pytest.raises(InvariantError, match="not finite"):
            sampled(*range(len(log_probs)), log_probs=log_probs)

    def test_infinities_that_cancel_out_are_seen(self):
        with pytest.raises(InvariantError, match="not finite"):
            sampled(1, 2, log_probs=(math.inf, -math.inf))


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=5), max_size=6))
def test_a_segment_is_the_concatenation_of_its_spans(parts):
    segment = Segment(
        tuple(Span(Provenance.PROMPT if i % 2 else Provenance.OBSERVATION, tuple(p)) for i, p in enumerate(parts))
    )
    assert segment.ids == [t for p in parts for t in p]
    assert len(segment) == len(segment.ids)
    of_prompt = count_tokens([segment, segment], Provenance.PROMPT)
    assert of_prompt == 2 * sum(len(p) for i, p in enumerate(parts) if i % 2)


class TestAction:
    def test_valid(self):
        assert Action("hello").valid
        assert Action("", calls=(ToolCall("f", {}, "c0"),)).valid
        assert not Action(" \n").valid
        assert not Action("hello", errors=(ParseError("content", "no JSON"),)).valid

    def test_defaults(self):
        assert Action("x").finish_reason is FinishReason.STOP
        assert Action("x").answer is None


class TestTrajectory:
    @pytest.mark.parametrize("reason", StopReason)
    def test_every_stop_reason_has_a_status(self, reason):
        assert reason.status is not Status.PENDING
        assert trajectory(stop_reason=reason).status is reason.status

    def test_failures_of_infrastructure_are_failed(self):
        failed = {r for r in StopReason if r.status is Status.FAILED}
        assert failed == {r for r in StopReason if r.name.endswith("_FAILURE")}

    def test_score_adds_steps_and_weighted_components_and_leaves_out_what_abstained(self):
        t = trajectory(
            turns=(turn(0, 0.25), turn(1, 0.5)),
            rewards={"exact": 1.0, "format": -0.5, "judge": None, "shown": 7.0},
            weights={"exact": 2.0, "judge": 100.0, "shown": 0.0},
        )
        assert t.score == 0.25 + 0.5 + 2.0 * 1.0 - 0.5

    def test_score_of_nothing_is_zero(self):
        assert trajectory().score == 0.0

    def test_the_last_answer_counts(self):
        assert trajectory().answer is None
        assert trajectory(turns=(turn(0, answer="Oslo"), turn(1, answer=""), turn(2))).answer == ""

    def test_label_and_sampled_tokens(self):
        assert trajectory().label == "Stockholm"
        assert trajectory().sampled_tokens == 2

    def test_records_are_immutable_and_survive_pickling_and_copying(self):
        t = trajectory(turns=(turn(0, answer="Oslo"),), rewards={"exact": 1.0})
        with pytest.raises(AttributeError):
            t.stop_reason = StopReason.MAX_TURNS
        assert pickle.loads(pickle.dumps(t)) == t
        assert copy.deepcopy(t) == t
