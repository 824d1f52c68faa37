"""Answers compared as mathematics, and rewards of form."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from reward_server import episode as episode_of

from agentrl.cli.main import main
from agentrl.errors import ContractError
from agentrl.reward import REWARDS, Scorer, resolve_rewards
from agentrl.rewards.formats import matches, well_formed
from agentrl.types import ParseError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("label", "answer", "score"), [
    ("0.5", r"\frac{1}{2}", 1.0), (r"\frac{1}{2}", "0.5", 1.0), ("1/2", "0.5", 1.0), ("4", "4.0", 1.0), (7, "7", 1.0),
    ("4", r"so the answer is \boxed{4}", 1.0), ("4", r"first 3, then \boxed{5}", 0.0), (r"\{1, 2\}", r"\{2, 1\}", 1.0),
    (r"x^2 + 2x + 1", r"(x+1)^2", 1.0), (["3", "4"], "4", 1.0), ("12", "21", 0.0), ("4", "four?", 0.0), ("4", "", 0.0),
    (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
])  # fmt: skip
async def test_an_answer_is_right_if_it_is_equal_as_mathematics(label, answer, score):
    episode = episode_of(answer)
    episode = replace(episode, task=replace(episode.task, label=label))
    (r,) = resolve_rewards(["math"])
    scored = await Scorer([r]).score(episode)
    assert scored.rewards == {"math": score}


async def test_mathematics_is_compared_in_threads():
    """The package's own time limits use signals, which threads do not get."""
    episode = episode_of("0.5")
    episodes = [replace(episode, task=replace(episode.task, label=r"\frac{1}{2}"), episode_id=str(n)) for n in range(8)]
    scorer = Scorer(resolve_rewards(["math"]))
    scored = await asyncio.gather(*map(scorer.score, episodes))
    assert {t.score for t in scored} == {1.0}


def test_a_missing_package_is_named_before_anything_starts(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "agentrl.rewards.math_answers", raising=False)
    monkeypatch.setitem(
        REWARDS._known, "math", "agentrl.rewards.math_answers:math_correct"
    )  # another test may have loaded it
    model = [
        "--model",
        str(ROOT / "tests/recorded/model"),
        "--rollout-max-context-len",
        "256",
        "--rollout-max-response-len",
        "64",
    ]
    assert main(["train", "--env", "search_r1", "--reward", "math", *model, "--run", "run"]) == 2
    assert "needs the package math-verify; install it with: pip install 'agentrl[math]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def broken(episode, turn):
    action = replace(episode.turns[turn].action, errors=(ParseError("structure", "x"),))
    turns = list(episode.turns)
    turns[turn] = replace(turns[turn], action=action)
    return replace(episode, turns=tuple(turns))


def test_well_formed_is_the_share_of_turns_that_can_be_parsed():
    episode = episode_of("Paris", "I look.")
    assert well_formed(episode) == 1.0
    assert well_formed(broken(episode, 0)) == 1 - 1 / len(episode.turns)
    assert well_formed(replace(episode, turns=())) == 0.0
    assert resolve_rewards(["well_formed=0.1"])[0].weight == 0.1


def test_every_turn_must_match_a_pattern_as_a_whole():
    episode = episode_of("Paris", "I look.")
    assert matches(".*")(episode) == 1.0
    assert matches("<think>.+</think>.+")(episode) == 0.0
    assert matches("(I look.|Par.s)")(episode) == 1.0
    assert matches("<think>.+</think>.+")(episode_of("<think>so\n</think>Paris")) == 1.0
    assert matches("(?!)")(episode) == 0.0
    with pytest.raises(ContractError, match="not a regular expression"):
        matches("(")
