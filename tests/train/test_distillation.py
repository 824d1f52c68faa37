"""Distillation: the reverse KL to the teachers is what is subtracted, token by token; teachers are chosen by task; wrong ones are refused."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from bigram import Bigram, episode, log_probs, made_batches  # noqa: E402

from agentrl.errors import ConfigError, DataError  # noqa: E402
from agentrl.train.distillation import Teachers  # noqa: E402
from agentrl.types import Group, Task  # noqa: E402


class TableTeacher:
    def __init__(self, table):
        self.table = table

    async def score(self, ids):
        return log_probs(self.table, ids)[1:].tolist()

    async def close(self): ...


def rollout(*names):
    """A group of one episode for each name of a teacher."""
    model, rng = Bigram.random(5), np.random.default_rng(5)
    groups = []
    for g, name in enumerate(names):
        task = Task(f"t{g}", "x", metadata={} if name is None else {"teacher": name})
        groups.append(Group(g, task, (replace(episode(model, rng, index=g, group=g), task=task),)))
    teachers = {"a": TableTeacher(model.ref), "b": TableTeacher(model.old)}
    return groups, model, teachers


def test_a_token_loses_the_reverse_kl_to_its_teacher_and_to_the_mean_of_all_where_its_task_names_none():
    groups, model, teachers = rollout("a", "b", None)
    made = made_batches(
        groups,
        model,
        {"advantage_estimator": "distillation", "opd_teacher": ["x"], "opd_kl_coef": 0.5},
        teachers=Teachers(teachers),
    )
    total = []
    for row in (r for rows in made.policy for r in rows):
        chosen = row.weights != 0
        a, b = (log_probs(t, row.tokens).numpy() for t in (model.ref, model.old))
        want = {"0-0": a, "1-0": b, "2-0": (a + b) / 2}[row.source[0]]
        reverse_kl = row.rollout_log_probs - want
        np.testing.assert_allclose(row.advantages[chosen], -0.5 * reverse_kl[chosen], rtol=1e-5, atol=1e-6)
        assert not row.advantages[~chosen].any()
        total += reverse_kl[chosen].tolist()
    assert made.metrics["opd_reverse_kl"] == pytest.approx(np.mean(total), rel=1e-5)


def test_beside_rewards_the_term_is_added_to_the_advantages_of_the_estimator():
    groups, model, teachers = rollout("a", "a")
    wanted = {"advantage_estimator": "reinforce_plus_plus"}
    plain = made_batches(groups, model, wanted).policy[0]
    mixed = made_batches(groups, model, wanted | {"opd_teacher": ["x"]}, teachers=Teachers(teachers)).policy[0]
    for before, after in zip(plain, mixed, strict=True):
        chosen = before.weights != 0
        term = before.rollout_log_probs - log_probs(model.ref, before.tokens).numpy()
        np.testing.assert_allclose(after.advantages[chosen], (before.advantages - term)[chosen], rtol=1e-4, atol=1e-5)


def test_an_unknown_teacher_is_refused_with_the_names_there_are():
    _, _, teachers = rollout("a")
    with pytest.raises(DataError, match=r"task 't' names the teacher 'c', which is none of --opd-teacher: a, b"):
        Teachers(teachers).check(Task("t", "x", metadata={"teacher": "c"}))


def test_a_local_teacher_scores_as_transformers_does(tmp_path, monkeypatch):
    import asyncio

    from models import hf_model, make_model

    from agentrl.engine.local import teacher

    folder = make_model(tmp_path / "model")
    monkeypatch.setattr(teacher, "POSITIONS", 4)
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 96, 11)]
    found = asyncio.run(teacher.LocalTeacher(folder, 96).score(ids))
    with torch.no_grad():
        logits = hf_model(folder)(torch.tensor(ids)[None]).logits[0, :-1].log_softmax(-1)
    want = logits.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="it has 96 tokens, the policy 97"):
        teacher.LocalTeacher(folder, 97)
