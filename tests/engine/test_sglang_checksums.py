"""The checksums of a server's weights, rank by rank, and which servers have some that can be compared."""

import pytest
from sglang_double import Double

from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.protocol import ServerFacts
from agentrl.errors import EngineFailure


def rank(number, **checksums):
    """As SGLang 0.5.23 reports it."""
    return {"checksums": checksums, "parallelism_info": [{"role": "target", "tp_rank": number}]}


async def checksums_of(server):
    await server.start()
    engine = SGLangEngine(server.address, timeout_s=5)
    try:
        await engine.start()
        return engine.api.checksum_kind, await engine.api.checksums()
    finally:
        await engine.close()
        await server.stop()


async def test_the_parameters_of_every_rank_are_named_by_it():
    ranks = [rank(1, norm="1", qkv="2"), rank(0, norm="1", qkv="3")]
    found = {"rank 0: norm": "1", "rank 0: qkv": "3", "rank 1: norm": "1", "rank 1: qkv": "2"}
    assert await checksums_of(Double(tp_size=2, ranks=ranks)) == (("mix", 2), found)
    plain = [r | {"parallelism_info": r["parallelism_info"][0]} for r in ranks]  # without a list
    assert await checksums_of(Double(tp_size=2, ranks=plain)) == (("mix", 2), found)
    assert await checksums_of(Double(ranks=ranks[1:], device="cpu")) == (("sha256", 1), {"norm": "1", "qkv": "3"})


@pytest.mark.parametrize(
    "ranks", [[rank(0, a="1")], [rank(0, a="1"), rank(0, a="1")], [rank(0, a="1"), rank(2, a="1")]]
)
async def test_an_answer_without_a_rank_verifies_nothing_and_is_refused(ranks):
    with pytest.raises(EngineFailure, match=r"malformed answer: checksums of the ranks .*, expected 2"):
        await checksums_of(Double(tp_size=2, ranks=ranks))


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        ({"tp_size": 2}, "mix"),
        ({"dp_size": 2}, ""),
        ({"pp_size": 2}, ""),
        ({"ep_size": 2}, ""),
        ({"quantization": "fp8"}, ""),
        ({"version": "0.5.18"}, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:SGLang 0.5.18 was not tested")
def test_servers_that_divide_weights_otherwise_have_none_that_can_be_compared(info, kind):
    facts = ServerFacts.read({"version": "0.5.23", **info}, {"/weights_checker": {}})
    assert facts.checksums == kind
