"""Scores of short answers: exact match and token F1 after SQuAD's normalization.

The normalization and both scores are those of Rajpurkar et al., 'SQuAD: 100,000+ Questions for Machine Comprehension of Text' (2016),
section 6.1. With several accepted answers the best score counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and the articles a, an and the, words separated by one space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golden_answers: str | Sequence[str]) -> float:
    """Return 1.0 if the prediction equals an accepted answer after normalization, else 0.0. None scores 0.0."""
    if prediction is None:
        return 0.0
    answer = normalize_answer(prediction)
    return float(any(answer == normalize_answer(golden) for golden in _answers(golden_answers)))


def f1(prediction: str | None, golden_answers: str | Sequence[str]) -> float:
    """Return the best harmonic mean of precision and recall over words, 0.0 to 1.0. Two empty answers score 1.0."""
    if prediction is None:
        return 0.0
    return max(
        (_f1(normalize_answer(prediction).split(), normalize_answer(g).split()) for g in _answers(golden_answers)),
        default=0.0,
    )


def _answers(golden_answers: str | Sequence[str]) -> Sequence[str]:
    return [golden_answers] if isinstance(golden_answers, str) else golden_answers


def _f1(predicted: list[str], golden: list[str]) -> float:
    if not predicted or not golden:
        return float(predicted == golden)
    common = sum((Counter(predicted) & Counter(golden)).values())
    return 2 * common / (len(predicted) + len(golden)) if common else 0.0
