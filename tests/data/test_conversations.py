"""Conversations of a data set as training rows: the assistant's words have mask 1, everything is as the template writes it."""

import json

import pytest

from agentrl.data.conversations import Census, read_conversations, to_trajectory
from agentrl.errors import DataError
from agentrl.train.sample import to_samples
from agentrl.types import Provenance

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And <|im_end|> of Japan?"},
    {"role": "assistant", "content": "東京"},
]


def test_masks_are_the_assistants_words_and_the_ids_are_the_templates(hermes):
    trajectory = to_trajectory(0, TALK, [], hermes, 512)
    (sample,) = to_samples(trajectory, demonstrations=True)
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    trained = [t for t, m in zip(response, sample.loss_mask, strict=True) if m]
    assert hermes.tokenizer.decode(trained) == "Paris.<|im_end|>東京<|im_end|>"
    text = hermes.tokenizer.decode(sample.tokens)
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhat is")
    assert "Paris.<|im_end|>\n<|im_start|>user\nAnd" in text
    assert sample.tokens.count(hermes.end_id) == 5, "the control token inside content is plain text"
    assert Provenance.SAMPLED not in {s.provenance for s in trajectory.segments[0].spans}
    assert to_samples(trajectory) == [], "reinforcement learning does not train on demonstrations"


def test_a_long_conversation_is_cut_after_its_last_turn_that_fits(hermes):
    whole = to_trajectory(0, TALK, [], hermes, 512)
    cut = to_trajectory(0, TALK, [], hermes, len(whole.segments[0]) - 1)
    assert len(whole.turns) == 2
    assert len(cut.turns) == 1


def test_rows_are_read_and_bad_ones_named(hermes, tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n\n" + json.dumps({"messages": TALK[:2]}) + "\n")
    rows = read_conversations(file, hermes, 512)
    assert len(next(rows).turns) == 2
    with pytest.raises(DataError, match="line 3: a conversation needs"):
        next(rows)
    file.write_text('{"message": []}\n')
    with pytest.raises(DataError, match="line 1: expected"):
        next(read_conversations(file, hermes, 512))
    with pytest.raises(DataError, match="no data file"):
        next(read_conversations(tmp_path / "missing.jsonl", hermes, 512))


def test_what_is_cut_and_left_out_is_counted_and_named(hermes, tmp_path):
    file = tmp_path / "c.jsonl"
    whole = len(to_trajectory(0, TALK, [], hermes, 512).segments[0])
    long = [TALK[0], {"role": "user", "content": "x " * 600}, *TALK[2:]]
    file.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (TALK[:3], TALK, long)))
    census = Census()
    trajectories = list(read_conversations(file, hermes, whole - 1, census))
    assert [len(t.turns) for t in trajectories] == [1, 1, 0]
    assert census.lines("c", whole - 1) == [
        "c: 3 conversations read, 2 used",
        f"c: 1 cut after the last turn that fits into {whole - 1} tokens ({file}, line 2)",
        f"c: 1 left out: not even the first assistant's turn fits into {whole - 1} tokens ({file}, line 3)",
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK[1:3]},
        {"conversations": [{"from": "human", "value": TALK[1]["content"]}, {"from": "gpt", "value": "Paris."}]},
        {"prompt": TALK[1]["content"], "completion": "Paris."},
        {"prompt": TALK[1:2], "completion": TALK[2:3]},
        {"messages": TALK[1:3], "tools": None},
        {"messages": [{**TALK[1], "tool_calls": None}, {**TALK[2], "content": [{"type": "text", "text": "Paris."}]}]},
    ],
)
def test_the_layouts_of_conversations_train_the_same_ids(hermes, tmp_path, row):
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps(row))
    (trajectory,) = read_conversations(file, hermes, 512)
    assert trajectory.segments == to_trajectory(0, TALK[1:3], [], hermes, 512).segments


def test_keys_that_parquet_fills_with_null_change_no_id(hermes, tmp_path):
    """Rows of which one has calls of two tools: the others, and the other tool's arguments, get its keys as null."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    lookup = {**CALL, "id": "abcdefgh1", "function": {"name": "lookup", "arguments": {"city": "Oslo"}}}
    calls = [{"role": "user", "content": "q", "tool_calls": [CALL, lookup]}]
    rows = [{"messages": TALK}, {"messages": TALK[1:3], "unused": calls}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in rows))
    read = [list(read_conversations(tmp_path / f"c.{kind}", hermes, 512)) for kind in ("parquet", "jsonl")]
    assert [t.segments for t in read[0]] == [t.segments for t in read[1]]


def test_tools_as_text_are_the_tools(hermes, tmp_path):
    file = tmp_path / "c.jsonl"
    tools = [{"type": "function", "function": {"name": "f"}}]
    file.write_text(json.dumps({"messages": TALK, "tools": json.dumps(tools)}))
    (trajectory,) = read_conversations(file, hermes, 512)
    assert trajectory.segments == to_trajectory(0, TALK, tools, hermes, 512).segments
    file.write_text("\n" + json.dumps({"messages": TALK, "tools": "f"}))
    with pytest.raises(DataError, match=r"c\.jsonl, line 2: tools is text that is not JSON"):
        next(read_conversations(file, hermes, 512))


def test_a_turn_that_the_template_cannot_express_is_refused_by_line(hermes, tmp_path):
    file = tmp_path / "c.jsonl"
    thought = {"role": "assistant", "content": "", "reasoning_content": "so"}
    file.write_text(json.dumps({"messages": [TALK[1], thought]}))
    with pytest.raises(DataError, match=r"c\.jsonl, line 1: .*leaves its reasoning out"):
        next(read_conversations(file, hermes, 512))


def test_a_spelt_end_token_is_trained_as_text(hermes):
    talk = [TALK[1], {"role": "assistant", "content": "A turn ends with <|im_end|> there."}]
    ids = [i for s in to_trajectory(0, talk, [], hermes, 512).segments for i in s.ids]
    assert ids.count(hermes.end_id) == 2


CALL = {"type": "function", "id": "abcdefgh0", "function": {"name": "search", "arguments": {"query": "x"}}}
RESULT = {"role": "tool", "name": "search", "tool_call_id": "abcdefgh0", "content": "found"}


def test_a_call_that_the_template_leaves_out_of_the_context_is_refused_by_line(hermes, tmp_path):
    """The fixture's template writes no `tool_calls`; the turn itself would be trained on after a context without the call."""
    file = tmp_path / "c.jsonl"
    shown = {"role": "assistant", "content": "Look", "tool_calls": [CALL]}
    file.write_text(json.dumps({"messages": [TALK[1], shown, RESULT, TALK[2]]}))
    with pytest.raises(DataError, match=r"c\.jsonl, line 1: .*leaves (its call|the call) of 'search'"):
        next(read_conversations(file, hermes, 512))
