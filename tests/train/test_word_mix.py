"""The checksum of a GPU's tensors: against the formula in plain integers, and against SGLang's own kernel, run by triton's interpreter."""

import json
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.sglang_install import find_installation
from agentrl.train.fused import checksums
from agentrl.train.word_mix import TILE, word_mix

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x85EBCA6B & M32
    x = (x ^ x >> 13) * 0xC2B2AE35 & M32
    return x ^ x >> 16


def rotated(x: int, turn: int) -> int:
    return (x << turn | x >> (32 - turn)) & M32


def in_plain_integers(content: bytes) -> int:
    content += bytes(-len(content) % 4)
    words = np.frombuffer(content, "<u4").tolist()
    second, total = (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & M32, 0
    for tile in range(0, len(words), TILE):
        high = low = 0
        for i, w in enumerate(words[tile : tile + TILE], tile):
            high += mix(w ^ (i * 0x27D4EB2D + 0x243F6A88 & M32) ^ rotated(i, 15))
            low += mix(w ^ (i * 0x165667B1 + second & M32) ^ rotated(i, 13))
        total += mix(high & M32 ^ len(content)) << 32 | mix(low & M32 ^ len(content))
    x = total & M64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31


@given(st.binary(min_size=1, max_size=200))
def test_any_bytes(content):
    assert word_mix(torch.frombuffer(bytearray(content), dtype=torch.uint8)) == in_plain_integers(content)


@pytest.mark.parametrize("words", [1, TILE - 1, TILE, TILE + 1, 3 * TILE + 17])
def test_tiles(words):
    content = np.random.default_rng(words).bytes(4 * words)
    assert word_mix(torch.frombuffer(bytearray(content), dtype=torch.bfloat16)) == in_plain_integers(content)


def test_parts_are_computed_one_after_the_other(monkeypatch):
    tensor = torch.randn(5 * TILE + 3)
    whole = word_mix(tensor)
    monkeypatch.setattr("agentrl.train.word_mix._AT_ONCE", 2 * TILE)
    assert word_mix(tensor) == whole
    monkeypatch.setattr("agentrl.train.word_mix._AT_ONCE", TILE)
    assert word_mix(tensor) == whole


def test_empty_and_strided():
    assert word_mix(torch.empty(0)) == 0
    table = torch.randn(8, 6)
    assert word_mix(table.T) == word_mix(table.T.contiguous()) != word_mix(table)


def test_one_bit_or_two_exchanged_words_show():
    tensor = torch.arange(3 * TILE, dtype=torch.int32)
    seen = {word_mix(tensor)}
    for where in (0, TILE, 3 * TILE - 1):
        other = tensor.clone()
        other[where] ^= 1
        seen.add(word_mix(other))
    other = tensor.clone()
    other[[5, TILE + 5]] = tensor[[TILE + 5, 5]]
    assert len(seen | {word_mix(other)}) == 5


def test_joined_parameters_and_the_padded_vocabulary():
    q, k, v, e = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4), torch.randn(70, 4)
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    found = checksums([*zip(names, (q, k, v), strict=True), ("model.embed_tokens.weight", e)], 70, "mix")
    assert found == {
        "model.layers.0.self_attn.qkv_proj.weight": f"{word_mix(torch.cat([q, k, v])):016x}",
        "model.embed_tokens.weight": f"{word_mix(torch.cat([e, torch.zeros(58, 4)])):016x}",
    }


KERNEL = """
import json, sys, numpy as np, torch
import sglang.kernels.ops.memory.gpu_tensor_hash as g
content = np.load(sys.argv[1])
out = []
for words in json.loads(sys.argv[2]):
    tensor = torch.from_numpy(content[:words].copy())
    # the module asks for a GPU; what it runs is told to take memory of the CPU
    tensor.__class__ = type("OnCard", (torch.Tensor,), {"is_cuda": True})
    out.append(g.gpu_tensor_hash(tensor))
print(json.dumps(out))
"""


@pytest.mark.sglang
def test_against_the_kernel_of_sglang(tmp_path):
    content = np.random.default_rng(1).integers(-(2**31), 2**31, 2 * TILE + 5, dtype=np.int32)
    np.save(tmp_path / "words.npy", content)
    sizes = [1, 100, TILE, 2 * TILE + 5]
    python = find_installation().python
    command = [str(python), "-c", KERNEL, str(tmp_path / "words.npy"), json.dumps(sizes)]
    env = dict(find_installation().environment, TRITON_INTERPRET="1")
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [word_mix(torch.from_numpy(content[:n].copy())) for n in sizes]
