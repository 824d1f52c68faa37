"""A run killed with -9 at any moment continues, with equal results, and leaves nothing behind; see kills.py."""

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from kills import FLAVOURS, SGLANG, play_cases
from sglang_server import available


def play(seeds, folder, **options):
    cases = dict(play_cases(seeds, folder, **options))
    assert len(cases) == len(seeds)
    assert not [case for case in cases.values() if "fault" in case]
    return cases.values()


@pytest.mark.full
@pytest.mark.sglang
@pytest.mark.skipif(not available(), reason="needs SGLang: make setup-sglang-cpu")
@pytest.mark.parametrize("flavour", SGLANG)
def test_a_run_with_a_genuine_server_that_is_killed_continues(tmp_path, flavour):
    play([1000], tmp_path, flavours=[flavour])


@pytest.mark.full
def test_runs_killed_at_three_moments_continue_bit_equal(tmp_path):
    play(range(3), tmp_path, flavours=["one rank"])


@pytest.mark.full
def test_runs_killed_at_a_hundred_moments_continue_bit_equal(tmp_path):
    assert {case["flavour"] for case in play(range(100), tmp_path)} == set(FLAVOURS)
