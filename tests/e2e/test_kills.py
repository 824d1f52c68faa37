"""A run killed with -9 at any moment continues, with equal results, and leaves nothing behind; see kills.py."""

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from kills import FLAVOURS, play_cases


@pytest.mark.full
def test_runs_killed_at_three_moments_continue_bit_equal(tmp_path):
    facts, faults = play_cases(range(3), tmp_path, flavours=["one rank"])
    assert not faults
    assert len(facts) == 3


@pytest.mark.full
def test_runs_killed_at_a_hundred_moments_continue_bit_equal(tmp_path):
    facts, faults = play_cases(range(100), tmp_path)
    assert not faults
    assert {f["flavour"] for f in facts} == set(FLAVOURS)
