"""The recorder: contexts grow by whole spans, sampled ids are appended once, a rewritten history opens a segment."""

import pytest
from doubles import OBSERVATION, PROMPT, SAMPLED, log_prob
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.base import Generation
from agentrl.errors import InvariantError
from agentrl.rollout.recorder import Recorder
from agentrl.types import FinishReason, Provenance

IDS = st.lists(st.integers(0, 50), min_size=1, max_size=5)


def generation(ids, version=1, **more):
    return Generation(
        tuple(ids), tuple(log_prob(t, i) for i, t in enumerate(ids)), FinishReason.STOP, policy_version=version, **more
    )


@given(IDS, st.lists(st.tuples(IDS, IDS), max_size=5))
def test_each_context_is_an_exact_prefix_of_the_next(prompt, turns):
    recorder = Recorder()
    recorder.open([(PROMPT, prompt)])
    sent = []
    for i, (sampled, observed) in enumerate(turns):
        sent.append(recorder.context())
        assert recorder.length() == len(sent[-1])
        recorder.sampled(generation(sampled), turn=i, temperature=0.7)
        recorder.extend([(Provenance.TEMPLATE, []), (OBSERVATION, observed)], turn=i)
    (segment,) = recorder.segments()
    assert segment.ids == [*prompt, *(t for s, o in turns for t in (*s, *o))]
    assert [s.ids for s in segment.spans if s.provenance is SAMPLED] == [tuple(s) for s, _ in turns]
    assert [segment.ids[: len(ids)] for ids in sent] == sent


def test_a_context_is_not_modified_when_the_episode_continues():
    recorder = Recorder()
    recorder.open([(PROMPT, [1])])
    first = recorder.context()
    recorder.extend([(PROMPT, [2]), (PROMPT, [3])], turn=0)
    second = recorder.context()
    recorder.sampled(generation([4]), turn=1, temperature=1.0)
    assert (first, second, recorder.context()) == ([1], [1, 2, 3], [1, 2, 3, 4])


def test_an_empty_generation_adds_no_span():
    recorder = Recorder()
    recorder.open([(PROMPT, [1])])
    recorder.sampled(generation([]), turn=0, temperature=1.0)
    assert len(recorder.segments()[0].spans) == 1


def test_a_demonstration_is_not_a_sampled_span():
    recorder = Recorder()
    recorder.open([(PROMPT, [1])])
    recorder.sampled(generation([2], demonstration=True), turn=0, temperature=1.0)
    (*_, span) = recorder.segments()[0].spans
    assert span.provenance is Provenance.DEMONSTRATION
    assert span.log_probs is None
    assert recorder.last_generated(0) == (2,)


def test_an_interrupted_generation_has_a_span_for_each_version():
    recorder = Recorder()
    recorder.open([(PROMPT, [1])])
    whole = generation([5, 6, 7], version=4, versions=((3, 1), (4, 2)))
    recorder.sampled(whole, turn=0, temperature=1.0)
    _, old, new = recorder.segments()[0].spans
    assert [(s.ids, s.policy_version) for s in (old, new)] == [((5,), 3), ((6, 7), 4)]
    assert old.log_probs + new.log_probs == whole.log_probs
    assert recorder.last_generated(0) == (5, 6, 7)
    recorder.extend([(OBSERVATION, [8])], turn=0)
    assert recorder.last_generated(0) == ()


def test_a_greedy_turn_is_recorded_at_temperature_one():
    recorder = Recorder()
    recorder.open([(PROMPT, [1])])
    recorder.sampled(generation([2]), turn=0, temperature=0.0)
    assert recorder.segments()[0].spans[-1].temperature == 1.0


@pytest.mark.parametrize("pieces", [[], [(PROMPT, [])]])
def test_a_segment_without_tokens_is_refused(pieces):
    recorder = Recorder()
    with pytest.raises(InvariantError, match="at least one token"):
        recorder.open(pieces)
    assert recorder.open([(PROMPT, [1])]) == 0


def test_agents_have_lines_of_their_own():
    recorder = Recorder()
    recorder.open([(PROMPT, [1])], agent_id="a")
    recorder.open([(PROMPT, [2])], agent_id="b")
    recorder.extend([(OBSERVATION, [3])], turn=0, agent_id="a")
    assert [(s.agent_id, s.ids) for s in recorder.segments()] == [("a", [1, 3]), ("b", [2])]
    assert (recorder.segment_index("a"), recorder.segment_index("b")) == (0, 1)


def test_an_agent_that_resumes_an_earlier_segment_extends_it():
    recorder = Recorder()
    first = recorder.open([(PROMPT, [1, 2])])
    recorder.sampled(generation([3]), turn=0, temperature=1.0)
    context = recorder.segment_ids(first, 3)
    second = recorder.open([(PROMPT, [1, 2, 9])])
    recorder.resume(first)
    recorder.extend([(OBSERVATION, [4])], turn=0)
    recorder.sampled(generation([5]), turn=1, temperature=1.0)
    assert (recorder.segment_index(), recorder.segment_length(second)) == (first, 3)
    assert [s.ids for s in recorder.segments()] == [[1, 2, 3, 4, 5], [1, 2, 9]]
    assert context == [1, 2, 3]  # what an engine holds does not change
