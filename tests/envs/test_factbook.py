"""The World Factbook's corpus, questions, expert and renaming."""

import random
import re
from collections import Counter

import pytest

from agentrl.envs import factbook
from agentrl.errors import DataError


def test_every_field_is_one_clean_passage() -> None:
    corpus = factbook.passages()
    assert len(corpus) == len({p.id for p in corpus}) == 32_607
    assert all(p.title and p.text for p in corpus)
    assert not any(mark in p.text for p in corpus for mark in ("<p>", "<br", "&nbsp;", "\n", "  "))
    by_title = {p.title: p for p in corpus}
    assert by_title["Sweden - Capital"].contents.startswith("Sweden - Capital: name: Stockholm; ")
    assert by_title["Sweden - Inflation rate (consumer prices)"].text.startswith("2024: 2.8%")


def test_splits_share_no_country() -> None:
    train, test = factbook.countries("train"), factbook.countries("test")
    assert len(test) == 50
    assert len(train) > 150
    assert not set(train) & set(test)
    asked = {row["metadata"]["country"] for row in factbook.questions("train")}
    assert asked == set(train)
    with pytest.raises(DataError, match="unknown split 'dev'"):
        factbook.countries("dev")  # type: ignore[arg-type]


@pytest.mark.parametrize(("split", "at_least"), [("train", 2000), ("test", 400)])
def test_questions_are_many_mixed_unique_and_deterministic(split: factbook.Split, at_least: int) -> None:
    rows = factbook.questions(split)
    assert len(rows) >= at_least
    assert len({row["id"] for row in rows}) == len({row["question"] for row in rows}) == len(rows)
    assert Counter(row["metadata"]["hops"] for row in rows[:200]) == {1: 100, 2: 100}
    assert len({row["metadata"]["field"] for row in rows}) >= 10
    assert factbook.questions(split, limit=7) == rows[:7]
    assert factbook.questions(split, seed=1) != rows
    assert all(row["golden_answers"] and all(row["golden_answers"]) for row in rows)


def test_the_wording_of_one_and_two_hops() -> None:
    rows = {row["id"]: row for split in ("train", "test") for row in factbook.questions(split)}  # type: ignore[arg-type]
    one, two = rows["Sweden:currency:1"], rows["Sweden:currency:2"]
    assert one["question"] == "What is the currency of Sweden?"
    assert two["question"] == "What is the currency of the country whose capital is Stockholm?"
    assert one["golden_answers"] == ["Swedish kronor", "SEK"]
    assert two["metadata"] == {"country": "Sweden", "field": "currency", "hops": 2}
    assert factbook.expert_plan(two).queries == ("Stockholm capital name", "Sweden currency per US dollar")
    assert factbook.expert_plan(one) == factbook.Plan(("Sweden currency per US dollar",), "Swedish kronor")


def test_every_answer_stands_in_its_passage() -> None:
    texts = {p.title: p.text for p in factbook.passages()}
    for row in factbook.questions("test"):
        country, field = row["metadata"]["country"], factbook.FIELDS[row["metadata"]["field"]]
        assert row["golden_answers"][0] in texts[f"{country} - {field.path[1]}"]


def test_a_renaming_is_consistent_and_can_be_undone() -> None:
    record = factbook.records()["Sweden"]
    renaming = factbook.Renaming(random.Random(3), record, share=1.0)
    text = "Sweden - Capital: name: Stockholm; Swedenborg stays. What is the code (.se) of Sweden?"
    told = renaming.apply(text)
    assert "Stockholm" not in told
    assert "(.se)" not in told
    assert "Swedenborg" in told
    assert told.count(renaming.forward["Sweden"]) == 2
    assert renaming.invert(told) == text
    assert factbook.Renaming(random.Random(3), record, share=1.0).forward == renaming.forward
    assert factbook.Renaming(random.Random(4), record).forward != renaming.forward


def test_invented_values_keep_their_shape() -> None:
    record = factbook.records()["Sweden"]
    forward = factbook.Renaming(random.Random(0), record, share=1.0).forward
    age = record.facts["median age"][0]
    assert forward[age].endswith(" years")
    assert len(forward[age]) == len(age)
    assert forward[".se"].startswith(".")
    assert len(forward[".se"]) == 3
    assert all(value not in forward for value in record.facts["colors"])


def test_no_held_out_name_is_used_for_renaming() -> None:
    names = {word for name in factbook.countries("test") for word in re.findall(r"[A-Z]\w+", name)}
    words = set(factbook._proper_words())
    assert len(words) > 10_000
    assert not names & words
