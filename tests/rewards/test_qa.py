"""Normalisation, exact match and F1 of short answers."""

import pytest

from agentrl.rewards.qa import exact_match, f1, normalize_answer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Quick, brown fox!", "quick brown fox"),
        ("an apple a day", "apple day"),
        ("1,234,567", "1234567"),
        ("theatre", "theatre"),
        (".se", "se"),
        ("A", ""),
        ("São Tomé", "são tomé"),
        ("", ""),
    ],
)
def test_normalisation(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal
    assert normalize_answer(normal) == normal


def test_exact_match_takes_any_accepted_answer() -> None:
    assert exact_match("the Swedish kronor.", ["SEK", "Swedish kronor"]) == 1.0
    assert exact_match("Swedish", ["SEK", "Swedish kronor"]) == 0.0
    assert exact_match("stockholm", "Stockholm") == 1.0
    assert exact_match(None, ["x"]) == 0.0
    assert exact_match("x", []) == 0.0


def test_f1_is_the_best_overlap_of_words() -> None:
    assert f1("Swedish kronor", ["Swedish kronor"]) == 1.0
    assert f1("Swedish money", ["nothing", "Swedish kronor"]) == pytest.approx(0.5)
    assert f1("x x y", ["x"]) == pytest.approx(0.5)
    assert f1("z", ["x y"]) == 0.0
    assert f1("the", ["a"]) == 1.0
    assert f1("", ["x"]) == 0.0
    assert f1(None, ["x"]) == 0.0
    assert f1("x", []) == 0.0


@pytest.mark.parametrize("text", ["Oslo", "12.5%", "blue, yellow"])
def test_a_match_has_f1_one(text: str) -> None:
    assert exact_match(text, text) == f1(text, text) == 1.0
