"""The record: episodes survive writing and reading, truncated records are skipped, damaged ones are errors."""

import dataclasses
import json
import threading

import orjson
import pytest
import zstandard
from doubles import PROMPT, SAMPLED, FakeGenerator, groups_of, make_runner, play, settled, span, trajectory
from hypothesis import given
from hypothesis import strategies as st

from agentrl import StepResult, ToolEnv, tool
from agentrl.core.summary_request import SummaryRequest
from agentrl.errors import StoreError
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.store import (
    VERSION,
    EpisodeWriter,
    encode,
    exactness_violations,
    from_record,
    read_episodes,
    read_records,
    to_record,
    truncate,
)
from agentrl.types import Action, Observation, ParseError, Provenance, Segment, StopReason, ToolCall, ToolResult, Turn


class Search(ToolEnv):
    action_format = "search_r1"

    @tool
    def search(self, query: str) -> str:
        """Look something up."""
        return f"über {query} " * 50

    async def step(self, action):
        result = await settled(ToolEnv.step(self, action))
        return StepResult(
            result.observation, 0.1, result.terminated, info={"n": [1, 2.5, None, {"a": "東京"}]}, state_key="k"
        )

    def state(self):
        return {"deep": {"list": [1, "two", None]}}


@pytest.fixture
async def episodes(tags):
    script = lambda r: ("<search>Paris</search>", "<think>?", "<answer>Paris</answer>")[min(r.turn, 2)]  # noqa: E731
    runner = make_runner(Search, script, tags, temperature=0.7, max_response_tokens=400)
    groups, _ = await Rollout(runner, RolloutLimits()).run(groups_of(2, 2))
    runner.close()
    return [t for g in groups for t in g.trajectories]


def write(folder, episodes, **extra):
    writer = EpisodeWriter(folder)
    for t in episodes:
        writer.write(t, **extra)
    writer.close()


async def test_an_episode_is_read_as_it_was_written(tmp_path, episodes):
    write(tmp_path, episodes, step=3)
    assert list(read_episodes(tmp_path)) == episodes
    assert [r["step"] for r in read_records(tmp_path)] == [3] * 4
    assert all(r["version"] == VERSION for r in read_records(tmp_path))
    (file,) = tmp_path.glob("*.zst")
    assert list(read_episodes(file)) == episodes


@pytest.mark.parametrize("reason", list(StopReason))
def test_every_stop_reason_and_field_survives(tmp_path, reason):
    action = Action(
        "x",
        (ToolCall("a", {"q": [1, {}]}, "c"),),
        (ParseError("content", "m", "t"),),
        answer="",
        results=(ToolResult("c", "a", "…", True, 9, "f" * 64, 0.5),),
    )
    turn = Turn(
        0,
        0,
        2,
        action,
        Observation(({"role": "tool", "content": [{"type": "text", "text": "x"}]},)),
        0.5,
        {"i": 1},
        "key",
        7,
        3,
        2,
        2**63 - 1,
        {"a": 0.5},
        "other",
    )
    spans = [
        span(PROMPT, (1, 2), -1),
        span(SAMPLED, (3,)),
        span(Provenance.FORCED, (4,)),
        span(Provenance.DEMONSTRATION, (5,)),
    ]
    t = trajectory(
        [spans, spans],
        reason=reason,
        turns=[turn],
        score=1.5,
        cause="why",
        demonstration=True,
        state={"a": [1]},
        timings={"x": 1.0},
    )
    write(tmp_path, [t])
    assert list(read_episodes(tmp_path)) == [t]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_any_json_value_a_policy_can_write_survives(value):
    """Integers of any size and lone surrogates are valid JSON in Python, and a policy can write them."""
    import json

    t = trajectory(turns=[Turn(0, 0, 2, Action("x", (ToolCall("a", {"q": value}, "c"),)))])
    line = encode(to_record(t))
    assert line.count(b"\n") == 1
    assert from_record(json.loads(line)) == t


@pytest.mark.parametrize(
    "value",
    [10**40, "\ud800", [[[]]] * 3, {1: 2}, {1, 2}, object(), threading.Lock(), float("nan"), b"raw"],
    ids=lambda v: str(type(v).__name__),
)
def test_whatever_a_user_puts_into_info_or_state_does_not_stop_the_run(tmp_path, value):
    t = trajectory(turns=[Turn(0, 0, 2, Action("x"), info={"v": value})], state={"v": value})
    write(tmp_path, [t, trajectory(index=1)])
    assert [r.index for r in read_episodes(tmp_path)] == [0, 1]


class Raising:
    def __repr__(self):
        raise RuntimeError("no repr")


class RaisingIteration(dict):
    def items(self):
        raise RuntimeError("no items")


def endless(levels=100_000):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def cycle():
    value = {"a": 1}
    value["self"] = [value]
    return value


ODD = {
    "tuple keys": (lambda: {(1, 2): "x", frozenset({1}): "y"}, {"(1, 2)": "x", "frozenset({1})": "y"}),
    "a cycle": (cycle, {"a": 1, "self": ["<dict that contains itself>"]}),
    "a repr that raises": (Raising, "<Raising that cannot be recorded: RuntimeError>"),
    "a key whose repr raises": (lambda: {Raising(): 1}, {"<Raising that cannot be recorded: RuntimeError>": 1}),
    "items that raise": (lambda: {"a": RaisingIteration(b=1), (): 1}, None),
    "a set of them": (lambda: {Raising()}, "<set that cannot be recorded: RuntimeError>"),
    "endless nesting": (endless, None),
    "NaN beside a big integer": (lambda: [float("nan"), float("inf"), 10**40], [None, None, 10**40]),
    "a type": (lambda: dict, "<class 'dict'>"),
    "a generator": (lambda: [(), {(): (x for x in [])}], None),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("where", ["info", "state", "metadata"])
def test_one_odd_value_costs_itself_and_never_the_record(tmp_path, name, where):
    make, expected = ODD[name]
    values = {"before": 1, "v": make(), "after": [2.5, "ü", 10**30]}
    t = trajectory(turns=[Turn(0, 0, 2, Action("x"), info=values if where == "info" else {})])
    if where == "state":
        t = dataclasses.replace(t, state=values)
    elif where == "metadata":
        t = dataclasses.replace(t, task=dataclasses.replace(t.task, metadata=values))
    write(tmp_path, [t, trajectory(index=1)])
    first, second = read_episodes(tmp_path)
    recorded = {"info": first.turns[0].info, "state": first.state, "metadata": first.task.metadata}[where]
    assert (recorded["before"], recorded["after"]) == (1, [2.5, "ü", 10**30])
    if expected is not None:
        assert recorded["v"] == expected
    page = encode(next(iter(read_records(tmp_path))))
    json.loads(page, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON: a browser cannot read it"))
    assert second.index == 1


def test_deep_nesting_is_written(tmp_path):
    deep = []
    for _ in range(400):
        deep = [deep]
    write(tmp_path, [trajectory(turns=[Turn(0, 0, 2, Action("x", (ToolCall("a", {"q": deep}, "c"),)))])])
    (t,) = read_episodes(tmp_path)
    assert t.turns[0].action.calls[0].arguments == {"q": deep}


@pytest.mark.parametrize("lost", [1, 7, 100])
def test_a_truncated_last_frame_is_skipped_and_writing_continues(tmp_path, lost):
    many = [trajectory(index=i) for i in range(3)]
    write(tmp_path, many)
    (file,) = tmp_path.glob("*.zst")
    file.write_bytes(file.read_bytes()[:-lost])
    assert [t.index for t in read_episodes(tmp_path)] == [0, 1]
    write(tmp_path, [trajectory(index=9)])  # the next run must not write behind the broken frame
    assert [t.index for t in read_episodes(tmp_path)] == [0, 1, 9]


def test_a_damaged_record_is_an_error_and_not_skipped(tmp_path):
    write(tmp_path, [trajectory(index=i) for i in range(3)])
    (file,) = tmp_path.glob("*.zst")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(StoreError, match=file.name):
        list(read_episodes(tmp_path))


def test_many_frames_are_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.store.episode_files._CHUNK", 100)
    many = [trajectory(index=i) for i in range(50)]
    write(tmp_path, many)
    assert list(read_episodes(tmp_path)) == many


def frame(tmp_path, value):
    file = tmp_path / "000000.jsonl.zst"
    file.write_bytes(zstandard.compress(orjson.dumps(value) + b"\n"))
    return file


def test_a_newer_version_is_refused(tmp_path):
    file = frame(tmp_path, {**to_record(trajectory()), "version": VERSION + 1})
    with pytest.raises(StoreError, match=f"record version {VERSION + 1}, this one reads up to {VERSION}"):
        list(read_records(file))


@pytest.mark.parametrize("value", [5, [], {"a": 1}, {"version": "x"}])
def test_a_line_that_is_not_an_episode_is_an_error(tmp_path, value):
    with pytest.raises(StoreError, match="not an episode record"):
        list(read_records(frame(tmp_path, value)))


@pytest.mark.parametrize("change", [{"stop_reason": "tired"}, {"segments": None}, {"task": {}}])
def test_a_record_with_broken_fields_names_the_episode(tmp_path, change):
    with pytest.raises(StoreError, match="episode 0-0"):
        list(read_episodes(frame(tmp_path, {**to_record(trajectory()), **change})))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(StoreError, match="no episodes at"):
        list(read_records(tmp_path / "none"))


def test_an_episode_is_not_written_into_a_file_that_was_deleted(tmp_path):
    writer = EpisodeWriter(tmp_path)
    writer.write(trajectory(index=0))
    next(tmp_path.glob("*.zst")).unlink()
    with pytest.raises(
        StoreError, match=r"000000\.jsonl\.zst is gone while episodes are recorded in it; was it deleted\?"
    ):
        writer.write(trajectory(index=1))


def test_truncate_restores_a_position(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.store.episode_files.ROTATE_BYTES", 1200)
    writer = EpisodeWriter(tmp_path)
    positions = []
    for i in range(12):
        positions.append(writer.position())
        writer.write(trajectory(index=i))
    writer.close()
    assert len(list(tmp_path.glob("*.zst"))) > 2
    for i in (11, 7, 3, 0):
        truncate(tmp_path, *positions[i])
        assert [t.index for t in read_episodes(tmp_path)] == list(range(i))
    write(tmp_path, [trajectory(index=0)])
    assert [t.index for t in read_episodes(tmp_path)] == [0]


def test_truncate_restores_a_position_taken_after_reopening(tmp_path):
    write(tmp_path, [trajectory(index=0)])
    writer = EpisodeWriter(tmp_path)
    position = writer.position()
    writer.write(trajectory(index=1))
    writer.close()
    truncate(tmp_path, *position)
    assert [t.index for t in read_episodes(tmp_path)] == [0]


async def test_exactness_violations_finds_a_planted_change(episodes):
    assert exactness_violations(episodes) == 0
    t = episodes[0]
    assert len(t.turns) == 3
    spans = list(t.segments[0].spans)
    at = next(i for i, s in enumerate(spans) if s.provenance is Provenance.OBSERVATION)
    ids = spans[at].ids
    spans[at] = span(Provenance.OBSERVATION, (*ids[:-1], ids[-1] + 1), spans[at].turn)
    object.__setattr__(t, "segments", (Segment(tuple(spans)),))
    assert exactness_violations(episodes) == 2, "the two turns whose context holds it"


async def test_a_policy_that_writes_a_huge_integer_or_a_surrogate_stops_nothing(tmp_path, hermes):
    """Through a whole episode, to the disk and back."""

    class Any(ToolEnv):
        @tool
        def any(self, x) -> str:
            """Take anything."""
            return "ok"

    bodies = [str(10**40), '"\\ud800"', "[" * 300 + "]" * 300]
    for body in bodies:
        text = f'<tool_call>{{"name": "any", "arguments": {{"x": {body}}}}}</tool_call>'
        t = await play(Any, FakeGenerator(hermes, [text, "<answer>x</answer>"]), hermes)
        write(tmp_path, [t])
    assert [t.stop_reason for t in read_episodes(tmp_path)] == [StopReason.TERMINATED] * 3


def test_every_field_of_a_turn_is_in_the_record():
    names = {f.name for f in dataclasses.fields(Turn)}
    action = Action("x", results=(ToolResult("c", "f", "text"),))
    request = SummaryRequest(instruction="sum up")
    more = {"context": ({"role": "user"},), "rewards": {"a": 1.0}, "summary": request}
    whole = json.loads(encode(to_record(trajectory(turns=[Turn(0, 0, 2, action, **more)]))))
    assert whole["turns"][0].keys() == names
    assert whole["turns"][0]["summary"] == dataclasses.asdict(request)
    assert from_record(whole).turns[0].summary == request
    assert whole["turns"][0]["action"].keys() == {f.name for f in dataclasses.fields(Action)}
    assert whole["turns"][0]["action"]["results"][0].keys() == {f.name for f in dataclasses.fields(ToolResult)}
    huge = dataclasses.replace(action, calls=(ToolCall("f", {"n": 1 << 70}, "c"),))
    again = json.loads(encode(to_record(trajectory(turns=[Turn(0, 0, 2, huge)]))))
    assert again["turns"][0]["action"]["calls"] == [{"name": "f", "arguments": {"n": 1 << 70}, "id": "c"}]


def test_the_keys_of_a_record_keep_their_order():
    """They are derived from the fields of `Trajectory`. Records are compared as bytes, so their order is part of the format."""
    assert list(to_record(trajectory(), step=1, split="train")) == [
        *("version", "kind", "step", "split", "episode_id", "group_index", "index", "attempt", "task", "env"),
        *("segments", "turns", "stop_reason", "status", "cause", "state", "rewards", "weights", "score", "seed"),
        *("demonstration", "timings"),
    ]
