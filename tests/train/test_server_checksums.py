"""The checksum of a GPU's tensors: against the formula in plain integers, and against SGLang's own kernel, run by triton's interpreter."""

import dataclasses
import json
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from agentrl.engine.sglang.installation import find_installation
from agentrl.train.megatron.delivery import server_checksums as module
from agentrl.train.megatron.delivery.server_checksums import (
    CHUNK,
    TILE,
    ServerLayout,
    finish,
    mixed_words,
    server_checksums,
)

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def mixed(*tensors: torch.Tensor) -> list[int]:
    return [int(finish(int(mixed_words([tensor]))), 16) for tensor in tensors]


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


def bytes_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@given(st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=5))
def test_any_bytes(contents):
    assert mixed(*map(bytes_of, contents)) == [in_plain_integers(c) for c in contents]


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=2, max_size=4))
def test_parts_are_one_tensor(parts):
    total = mixed_words([bytes_of(p) for p in parts])
    assert finish(int(total)) == f"{in_plain_integers(b''.join(parts)):016x}"


@pytest.mark.parametrize("words", [1, TILE - 1, TILE, TILE + 1, 3 * TILE + 17])
def test_tiles(words):
    content = np.random.default_rng(words).bytes(4 * words)
    assert mixed(torch.frombuffer(bytearray(content), dtype=torch.bfloat16)) == [in_plain_integers(content)]


@pytest.mark.parametrize("tiles", [1, 2, 3, 7])
def test_the_chunk_size_does_not_matter(tiles, monkeypatch):
    tensors = [torch.randn(n) for n in (5 * TILE + 3, 1, TILE, 2 * TILE, 7, 3 * TILE - 1)]
    alone = [mixed(t)[0] for t in tensors]
    monkeypatch.setattr(module, "CHUNK", tiles * TILE)
    assert mixed(*tensors) == alone


def test_a_tensor_larger_than_a_chunk():
    content = np.random.default_rng(0).bytes(4 * TILE * 3 + 20)
    tensor = torch.zeros(CHUNK, dtype=torch.int32)
    tail = torch.frombuffer(bytearray(content), dtype=torch.int32)
    assert mixed(tensor, tail)[1] == in_plain_integers(content)
    last = torch.cat([tensor, tail])
    other = last.clone()
    other[-1] ^= 1
    assert mixed(last) != mixed(other)


def test_empty_and_strided():
    assert mixed(torch.empty(0), torch.ones(3)) == [0, *mixed(torch.ones(3))]
    table = torch.randn(8, 6)
    assert mixed(table.T) == mixed(table.T.contiguous()) != mixed(table)


def test_one_bit_or_two_exchanged_words_show():
    tensor = torch.arange(3 * TILE, dtype=torch.int32)
    others = []
    for where in (0, TILE, 3 * TILE - 1):
        others.append(tensor.clone())
        others[-1][where] ^= 1
    others.append(tensor.clone())
    others[-1][[5, TILE + 5]] = tensor[[TILE + 5, 5]]
    assert len(set(mixed(tensor, *others))) == 5


def test_joined_parameters_and_the_padded_vocabulary():
    q, k, v, e = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4), torch.randn(70, 4)
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    found = server_checksums(
        [*zip(names, (q, k, v), strict=True), ("model.embed_tokens.weight", e)], ServerLayout(vocab_size=70), "mix"
    )
    values = mixed(torch.cat([q, k, v]), torch.cat([e, torch.zeros(58, 4)]))
    assert found == {
        "model.layers.0.self_attn.qkv_proj.weight": f"{values[0]:016x}",
        "model.embed_tokens.weight": f"{values[1]:016x}",
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
    assert json.loads(done.stdout.splitlines()[-1]) == mixed(*(torch.from_numpy(content[:n].copy()) for n in sizes))


def test_the_experts_of_a_layer_are_two_parameters_in_their_order():
    """SGLang: gate and up of expert 0, of expert 1 …, and the down matrices; tensors may come in any order."""
    prefix = "model.layers.1.mlp.experts"
    parts = [(i, part, torch.randn(2, 3)) for part in ("up", "gate", "down") for i in (1, 0, 2)]
    tensors = [(f"{prefix}.{i}.{part}_proj.weight", t) for i, part, t in parts]
    joined = [t for i in range(3) for name in ("gate", "up") for j, part, t in parts if (i, name) == (j, part)]
    down = [t for i in range(3) for j, part, t in parts if (i, "down") == (j, part)]
    assert server_checksums(tensors, ServerLayout(vocab_size=64, experts=3), "sha256") == {
        f"{prefix}.w13_weight": module.sha256(joined),
        f"{prefix}.w2_weight": module.sha256(down),
    }


def test_gate_and_up_that_are_one_tensor_already_are_one_parameter():
    tensor = torch.randn(4, 3)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert server_checksums([(name, tensor)], ServerLayout(vocab_size=64), "sha256") == {name: module.sha256([tensor])}


def test_the_ranks_of_a_server_have_heads_rows_columns_and_the_padded_vocabulary():
    """Four ranks, two key-value heads: two ranks have the same one. The last rank has the end of the vocabulary, and zeros."""
    q, k, v = torch.randn(8, 6), torch.randn(4, 6), torch.randn(4, 6)
    o, down, norm, table = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6), torch.randn(70, 6)
    names = {f"model.layers.0.self_attn.{x}_proj.weight": t for x, t in zip("qkvo", (q, k, v, o), strict=True)}
    names |= {"model.layers.0.mlp.down_proj.weight": down, "model.norm.weight": norm, "lm_head.weight": table}
    layout = ServerLayout(vocab_size=70, key_value_heads=2, ranks=4)
    found = server_checksums(names.items(), layout, "sha256")
    assert len(found) == 4 * 5
    padded = torch.cat([table, torch.zeros(58, 6)])
    for rank in range(4):
        heads = slice(rank // 2 * 2, rank // 2 * 2 + 2)
        own = {
            "model.layers.0.self_attn.qkv_proj.weight": torch.cat([q[2 * rank : 2 * rank + 2], k[heads], v[heads]]),
            "model.layers.0.self_attn.o_proj.weight": o[:, 2 * rank : 2 * rank + 2],
            "model.layers.0.mlp.down_proj.weight": down[:, 2 * rank : 2 * rank + 2],
            "model.norm.weight": norm,
            "lm_head.weight": padded[32 * rank : 32 * rank + 32],
        }
        for name, tensor in own.items():
            assert found[f"rank {rank}: {name}"] == module.sha256([tensor.contiguous()]), (rank, name)
    mixed_up = server_checksums(names.items(), dataclasses.replace(layout, key_value_heads=4), "sha256")
    assert mixed_up != found


@pytest.mark.parametrize(("ranks", "size"), [(1, 128), (2, 128), (4, 128), (3, 192), (6, 384)])
def test_the_vocabulary_is_padded_so_that_the_ranks_divide_it(ranks, size):
    assert ServerLayout(vocab_size=70, ranks=ranks).padded_vocab_size == size


LAYERS = """
import sys
from types import SimpleNamespace
from safetensors.torch import load_file, save_file
from sglang.srt.layers import linear, vocab_parallel_embedding as vocabulary

size, tensors = int(sys.argv[1]), load_file(sys.argv[2])
# what the layers ask for their place; they communicate only in `forward`
place = SimpleNamespace(tp_rank=0, tp_size=size, attn_tp_rank=0, attn_tp_size=size)
linear.get_group_rank_size = lambda _: (place.tp_rank, size)
linear._resolve_linear_group = vocabulary._resolve_linear_group = lambda *_: place
vocabulary.get_parallel = lambda: place

def loaded(layer, *parts):
    for part in parts:
        layer.weight.weight_loader(layer.weight, *part)
    return layer.weight.data.clone().contiguous()

found, t = {}, tensors
for rank in range(size):
    place.tp_rank = place.attn_tp_rank = rank
    found |= {
        f"{rank} qkv": loaded(linear.QKVParallelLinear(8, 2, 4, 2, bias=False), *((t[x], x) for x in "qkv")),
        f"{rank} up": loaded(linear.MergedColumnParallelLinear(8, [12, 12], bias=False), (t["gate"], 0), (t["up"], 1)),
        f"{rank} o": loaded(linear.RowParallelLinear(8, 8, bias=False), (t["o"],)),
        f"{rank} down": loaded(linear.RowParallelLinear(12, 8, bias=False), (t["down"],)),
        f"{rank} table": loaded(vocabulary.VocabParallelEmbedding(70, 8), (t["table"],)),
    }
save_file(found, sys.argv[3])
"""


@pytest.mark.sglang
@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_have_what_the_layers_of_sglang_load(tmp_path, ranks):
    """SGLang's own layers, one rank after the other in one process. With four ranks, two have the same key-value head."""
    shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "gate": (12, 8), "up": (12, 8), "down": (8, 12)}
    tensors = {name: torch.randn(shape) for name, shape in {**shapes, "table": (70, 8)}.items()}
    save_file(tensors, tmp_path / "whole.safetensors")
    installation = find_installation()
    files = [str(tmp_path / f"{name}.safetensors") for name in ("whole", "parts")]
    command = [str(installation.python), "-c", LAYERS, str(ranks), *files]
    done = subprocess.run(
        command, capture_output=True, text=True, env=installation.environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parts = load_file(files[1])
    names = {
        "qkv": "model.layers.0.self_attn.qkv_proj.weight",
        "up": "model.layers.0.mlp.gate_up_proj.weight",
        "o": "model.layers.0.self_attn.o_proj.weight",
        "down": "model.layers.0.mlp.down_proj.weight",
        "table": "model.embed_tokens.weight",
    }
    modules = {"gate": "mlp", "up": "mlp", "down": "mlp", **dict.fromkeys("qkvo", "self_attn")}
    given = {f"model.layers.0.{modules[n]}.{n}_proj.weight": t for n, t in tensors.items() if n != "table"}
    layout = ServerLayout(vocab_size=70, key_value_heads=2, ranks=ranks)
    found = server_checksums([*given.items(), (names["table"], tensors["table"])], layout, "sha256")
    of_layers = {f"rank {r}: {names[part]}": tensor for key, tensor in parts.items() for r, part in [key.split()]}
    assert found == {name: module.sha256([tensor]) for name, tensor in of_layers.items()}
