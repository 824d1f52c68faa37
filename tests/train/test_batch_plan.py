"""The batch plan holds every row once, within the limit, balanced, with rows that share a prefix together."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.batch_plan import batch_plan, micro_batch_sizes, packing, trainer_plan
from agentrl.train.token_tree import token_tree

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=16).map(
    lambda rows: [np.array(r) for r in rows]
)


def sizes(rows, plan, tree=True):
    """Unique tokens of each micro-batch."""
    return [[len(token_tree([rows[i][:-1] for i in part], share=tree).tokens) for part in parts] for parts in plan]


@given(ROWS, st.integers(1, 3), st.integers(1, 20), st.booleans())
def test_a_plan_holds_every_row_once_within_the_limit_in_equal_numbers_of_micro_batches(rows, ranks, limit, tree):
    plan = batch_plan(rows, ranks, limit, tree=tree)
    assert sorted(i for parts in plan for part in parts for i in part) == list(range(len(rows)))
    assert len({len(parts) for parts in plan}) == 1
    for parts, tokens in zip(plan, sizes(rows, plan, tree), strict=True):
        assert all(n <= limit or len(part) == 1 for part, n in zip(parts, tokens, strict=True))
    assert plan == batch_plan(rows, ranks, limit, tree=tree)


@pytest.mark.parametrize("tree", [True, False])
def test_a_micro_batch_has_at_most_so_many_rows(tree):
    plan = batch_plan([np.arange(4)] * 7, 2, 100, 2, tree=tree)
    assert sorted(len(part) for parts in plan for part in parts) == [1, 2, 2, 2]


def group(number, prompt=20, answers=8, length=10):
    """Rows that share a prompt; the last token of a row is no input."""
    start = 1000 * number + np.arange(prompt)
    return [np.concatenate([start, 1000 * number + 100 * (a + 1) + np.arange(length + 1)]) for a in range(answers)]


def test_groups_stay_together_where_they_fit_whatever_the_order_of_the_rows():
    rows = [row for number in range(6) for row in group(number)]
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    plan = batch_plan([rows[i] for i in order], 1, 2 * (20 + 8 * 10))
    groups = [{order[i] // 8 for i in part} for part in plan[0]]
    assert [len(g) for g in groups] == [2, 2, 2]
    assert set.union(*groups) == set(range(6))


def test_a_group_over_the_limit_is_cut_and_its_prompt_repeated():
    plan = batch_plan(group(0), 1, 60)
    assert sorted(sizes(group(0), plan)[0]) == [60, 60]


def test_ranks_have_similar_costs():
    rng = np.random.default_rng(0)
    for tree in (True, False):
        rows = [row for n in range(9) for row in group(n, *rng.integers(5, 40, 3).tolist())]
        loads = [sum(tokens) for tokens in sizes(rows, batch_plan(rows, 3, 500, tree=tree), tree)]
        assert max(loads) - min(loads) <= 0.2 * max(loads), tree
    assert min(map(sum, sizes(group(0), batch_plan(group(0), 2, 1000)))) >= 60, "one tree is cut to occupy both ranks"


def test_a_row_longer_than_the_limit_stands_alone_and_a_share_may_be_empty():
    rows = [np.arange(50), 100 + np.arange(5), 200 + np.arange(5)]
    for tree in (True, False):
        assert sorted(batch_plan(rows, 1, 10, tree=tree)[0], key=len) == [[0], [1, 2]]
        assert batch_plan(rows[:1], 2, 10, tree=tree) == [[[0]], [[]]]


@pytest.mark.parametrize(("tree", "computed"), [(True, 100), (False, 240)])
def test_metrics_count_tokens_as_rows_as_a_tree_and_padding(tree, computed):
    trainer = SimpleNamespace(copies=1, micro_batch_tokens=1000, micro_batch_rows=None, multiple=16, tree_packing=tree)
    rows = [SimpleNamespace(tokens=r, routed_experts=None, images=()) for r in group(0)]
    plan = trainer_plan(trainer, rows)
    padded = -(-computed // 16) * 16
    assert micro_batch_sizes(trainer, rows, plan) == [[padded]]
    assert packing(trainer, rows, plan) == {
        "row_tokens": 240,
        "tree_tokens": computed,
        "padding_tokens": padded - computed,
    }


def test_padding_is_within_the_limit():
    trainer = SimpleNamespace(copies=1, micro_batch_tokens=100, micro_batch_rows=None, multiple=16, tree_packing=False)
    rows = [SimpleNamespace(tokens=np.arange(n + 1), routed_experts=None, images=()) for n in (50, 49, 48, 1)]
    assert max(micro_batch_sizes(trainer, rows, trainer_plan(trainer, rows))[0]) <= 100
