"""The tree holds every prefix once, and its attention blocks hold every ancestor of every token once."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.attention_blocks import attention_calls
from agentrl.train.token_tree import token_tree

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12).map(
    lambda rows: [np.array(r, int) for r in rows]
)


def chain(turns, shared=5, own=3):
    """Rows of an episode whose thinking is stripped: each starts with a longer prefix of the same history."""
    history = np.arange(turns * shared) + 100
    return [np.concatenate([history[: (t + 1) * shared], 1000 * (t + 1) + np.arange(own)]) for t in range(turns)]


@given(ROWS, st.booleans())
def test_every_row_is_a_path_from_a_root_and_every_prefix_is_there_once(rows, share):
    tree = token_tree(rows, share=share)
    for row, where in zip(rows, tree.rows, strict=True):
        assert tree.tokens[where].tolist() == row.tolist()
        assert tree.positions[where].tolist() == list(range(len(row)))
    prefixes = {tuple(r[: i + 1]) for r in rows for i in range(len(r))}
    assert len(tree.tokens) == (len(prefixes) if share else sum(map(len, rows)))
    assert tree.pairs == sum(len(p) for p in prefixes) or not share


@given(ROWS, st.booleans())
def test_paths_and_subtrees_are_contiguous_in_the_layout(rows, share):
    paths = token_tree(rows, share=share).paths
    assert [p.start for p in paths] == [0, *(p.stop for p in paths)][: len(paths)]
    for number, path in enumerate(paths):
        assert path.start < path.stop <= path.end
        if path.parent >= 0:
            parent = paths[path.parent]
            assert path.parent < number
            assert parent.stop <= path.start < path.end <= parent.end
            assert 0 < path.attach <= parent.stop - parent.start


def seen_keys(calls, length):
    """How often each query attends to each key."""
    seen = np.zeros((length, length), int)
    for call in calls:
        for block in call.blocks:
            (a, b), (c, d) = block.queries, block.keys
            seen[a:b, c:d] += np.tri(b - a, dtype=int) if call.causal else 1
    return seen


@given(ROWS, st.booleans(), st.integers(1, 5))
def test_a_query_attends_to_its_ancestors_and_itself_once_each(rows, share, chunks):
    """Whatever ranges of the layout the queries are taken from."""
    tree = token_tree(rows, share=share)
    n = len(tree.tokens)
    want = np.zeros((n, n), int)
    for where in tree.rows:
        for i, query in enumerate(where):
            want[query, where[: i + 1]] = 1
    edges = np.linspace(0, n, chunks + 1).astype(int)
    spans = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    parts = [spans[::2], spans[1::2]]
    got = sum(seen_keys(attention_calls(tree.paths, part), n) for part in parts if part)
    assert (got == want).all()


@given(ROWS)
def test_blocks_of_a_call_have_no_common_query_and_the_first_call_holds_all(rows):
    tree = token_tree(rows)
    first, *others = attention_calls(tree.paths, [(0, len(tree.tokens))])
    assert sum(b.queries[1] - b.queries[0] for b in first.blocks) == len(tree.tokens)
    for call in (first, *others):
        assert all(a.queries[1] <= b.queries[0] for a, b in zip(call.blocks, call.blocks[1:], strict=False))


def test_a_shared_prompt_takes_one_call_beside_the_causal_one():
    prompt = np.arange(50)
    rows = [np.concatenate([prompt, 100 * (i + 1) + np.arange(20)]) for i in range(8)]
    tree = token_tree(rows)
    assert len(tree.tokens) == 50 + 8 * 20
    causal, shared = attention_calls(tree.paths, [(0, len(tree.tokens))])
    assert causal.causal
    assert [(b.queries, b.keys) for b in shared.blocks] == [((70, 210), (0, 50))]


def test_stripped_thinking_over_many_turns_takes_few_calls():
    for turns in (2, 5, 20, 200):
        tree = token_tree(chain(turns))
        calls = attention_calls(tree.paths, [(0, len(tree.tokens))])
        assert len(calls) <= 2 + math.ceil(math.log2(turns)), turns
