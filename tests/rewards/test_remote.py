"""Judges and reward models over HTTP: retried while the server is busy, limited in rate, and exact when scored again without it."""

import asyncio
import time
from dataclasses import replace

import pytest
from reward_server import RewardServer, chat
from reward_server import episode as episode_of

from agentrl import reward
from agentrl.errors import ConfigError, ContractError, RewardFailure
from agentrl.replay.rescore import rescore_group
from agentrl.reward import Scorer
from agentrl.rewards.remote import PROMPT, ChatJudge, RewardModel, last_number
from agentrl.store.episode_record import decode, encode, from_record, to_record


def judge_of(server, **settings):
    return ChatJudge(url=f"{server.url}/v1", model="m", backoff_s=0.01, **settings)


def scorer_of(service):
    return Scorer([reward(name="judged")(service)])


async def test_a_judge_sees_question_answer_and_label_and_its_number_is_the_score():
    async with RewardServer(lambda *_: (200, chat("It is right {label}.\n0.5"), {})) as server:
        judge = judge_of(server, prompt="{question}|{answer}|{label}|{other}")
        scored = await scorer_of(judge).score(episode_of("{label}"))
    assert scored.rewards == {"judged": 0.5}
    (request,) = server.requests
    episode = episode_of("{label}")
    text = f"{episode.task.messages[-1]['content']}|{{label}}|{episode.label}|{{other}}"
    assert request == {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 512,
        "temperature": 0.0,
    }


async def test_scoring_again_asks_nothing_and_is_exact_also_from_the_record():
    answers = iter((0.25, 0.75))
    async with RewardServer(lambda *_: (200, {"score": next(answers)}, {})) as server:
        scorer = scorer_of(RewardModel(url=f"{server.url}/score"))
        scored = await scorer.score(episode_of("Paris", "I look."))
        read = from_record(decode(encode(to_record(scored)), "here"))
    assert read.judgements == scored.judgements
    (again,) = (await rescore_group(scorer, [read])).today  # the server is gone
    assert again.rewards == scored.rewards == {"judged": 0.25}
    played_again = await scorer.with_judgements(read.judgements).score(episode_of("Paris", "I look."))
    assert played_again.rewards == {"judged": 0.25}


async def test_another_request_is_made_anew():
    async with RewardServer(lambda n, _: (200, chat(str(n)), {})) as server:
        first = await scorer_of(judge_of(server)).score(episode_of("Paris", "I look."))
        other = await scorer_of(judge_of(server, prompt=PROMPT + " Be strict.")).score(replace(first, rewards={}))
    assert (first.rewards["judged"], other.rewards["judged"]) == (1.0, 2.0)
    assert len(other.judgements) == 2


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_a_busy_server_is_asked_again_with_growing_pauses(status):
    busy = lambda n, _: (status, "busy", {}) if n < 4 else (200, chat("1"), {})  # noqa: E731
    async with RewardServer(busy) as server:
        scored = await scorer_of(judge_of(server)).score(episode_of("Paris", "I look."))
    assert scored.rewards == {"judged": 1.0}
    pauses = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert [p >= 0.01 * 2**i for i, p in enumerate(pauses)] == [True] * 3


async def test_a_pause_that_the_server_names_is_kept():
    async with RewardServer(
        lambda n, _: (429, "", {"Retry-After": "0.3"}) if n < 2 else (200, chat("1"), {})
    ) as server:
        await scorer_of(judge_of(server)).score(episode_of("Paris", "I look."))
    assert server.times[1] - server.times[0] >= 0.3


@pytest.mark.parametrize(("answer", "requests", "message"), [
    ((503, "down", {}), 3, "did not answer in 3 attempts; the last: HTTP 503: down"),
    ((401, "no key", {}), 1, "refuses the request: HTTP 401: no key"),
    ((200, "<html>", {}), 1, "other than JSON"),
    ((200, {"error": "x"}, {}), 1, "not an answer of Chat Completions"),
    ((200, chat(None), {}), 1, "not an answer of Chat Completions with a message of text"),
    ((200, chat("who knows"), {}), 1, "holds no number"),
])  # fmt: skip
async def test_without_a_judgement_the_episode_is_not_scored(answer, requests, message):
    async with RewardServer(lambda *_: answer) as server:
        with pytest.raises(RewardFailure, match=message):
            await scorer_of(judge_of(server, retries=2)).score(episode_of("Paris", "I look."))
    assert len(server.requests) == requests


async def test_requests_are_limited_in_rate_and_number():
    async with RewardServer(lambda *_: (200, chat("1"), {})) as server:
        scorer = scorer_of(judge_of(server, max_per_second=40, max_concurrency=1))
        episodes = [replace(episode_of(str(n)), episode_id=str(n)) for n in range(6)]
        started = time.perf_counter()
        await asyncio.gather(*map(scorer.score, episodes))
    assert len(server.requests) == 6
    assert server.times[-1] - started >= 5 / 40 - 0.01
    assert server.most == 1


async def test_a_key_is_sent_from_the_environment_and_stays_out_of_the_record(monkeypatch):
    async with RewardServer(lambda *_: (200, chat("1"), {})) as server:
        scorer = scorer_of(judge_of(server, api_key_env="JUDGE_KEY"))
        monkeypatch.delenv("JUDGE_KEY", raising=False)
        with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
            await scorer.score(episode_of("Paris", "I look."))
        monkeypatch.setenv("JUDGE_KEY", "secret5d")
        scored = await scorer.score(episode_of("Paris", "I look."))
    assert server.headers[-1]["Authorization"] == "Bearer secret5d"
    assert b"secret5d" not in encode(to_record(scored))


async def test_the_members_of_a_group_keep_their_own_judgements():
    async with RewardServer(lambda n, _: (200, {"score": n}, {})) as server:
        model = RewardModel(url=f"{server.url}/score")

        async def relative(members):
            scores = [await model(t) for t in members]
            return [s - min(scores) for s in scores]

        scorer = Scorer([reward(name="relative", group=True)(relative)])
        members = [replace(episode_of(str(n)), episode_id=str(n)) for n in range(2)]
        scored = await scorer.score_group(members)
    assert [t.rewards["relative"] for t in scored] == [0.0, 1.0]
    assert [list(t.judgements.values()) for t in scored] == [[{"score": 1}], [{"score": 2}]]


@pytest.mark.parametrize("settings", [{"url": "localhost"}, {"retries": -1}, {"max_per_second": 0}, {"timeout_s": 0}])
def test_settings_that_cannot_work_are_refused_where_they_are_written(settings):
    with pytest.raises(ContractError, match="RewardModel"):
        RewardModel(**{"url": "http://x", **settings})


def test_the_last_number_of_a_text_is_the_score():
    assert last_number("2 of 3 points are right, so:\n-0.5") == -0.5
