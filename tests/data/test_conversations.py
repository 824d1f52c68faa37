"""Conversations of a data set as training rows: the assistant's words have mask 1, everything is as the template writes it."""

import json

import pytest

from agentrl.data.conversations import read_conversations, to_trajectory
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
