"""Buckets of weights, the form in which SGLang reads them, and checksums of joined parameters."""

import base64
import hashlib
import io
import pickle
import subprocess
import sys

import torch

from agentrl.train.megatron.delivery.buckets import buckets, serialise
from agentrl.train.megatron.delivery.server_checksums import ServerLayout, server_checksums

ALLOWED = {
    ("types", "SimpleNamespace"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "uint8"),
    ("torch", "UntypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.storage", "TypedStorage"),
}
"""What a receiver with a restricted unpickler allows: torch's data, no code of SGLang or agentrl."""


class Careful(pickle.Unpickler):
    def find_class(self, module, name):
        assert (module, name) in ALLOWED, (module, name)
        return super().find_class(module, name)


def tensors(*sizes, dtype=torch.float32):
    return [(f"t{i}", torch.randn(n, 2).to(dtype), [n, 2]) for i, n in enumerate(sizes)]


def test_buckets_hold_what_fits_and_large_tensors_stand_alone():
    made = list(buckets(tensors(3, 10, 10, 100, 5, 5), 200, shared=False))
    assert [b.names for b in made] == [["t0"], ["t1", "t2"], ["t3"], ["t4", "t5"]]
    assert [b.used for b in made] == [24, 160, 800, 80]
    assert [b.flat.numel() for b in made] == [25, 200, 800, 200]  # the first is an eighth


def test_every_tensor_comes_back():
    sent = tensors(3, 7, 4, dtype=torch.bfloat16)
    for bucket in buckets(sent, 64, shared=False):
        start = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            size = torch.Size(shape).numel() * 2
            assert torch.equal(
                bucket.content[start : start + size].view(getattr(torch, dtype)).view(shape),
                {n: t for n, t, _ in sent}[name],
            )
            start += size


def test_mixed_dtypes_keep_aligned_offsets():
    mixed = [("a", torch.ones(3, dtype=torch.bfloat16), [3]), ("b", torch.ones(2), [2]), ("c", torch.ones(2), [2])]
    assert [b.names for b in buckets(mixed, 1000, shared=False)] == [["a"], ["b", "c"]]


def test_a_view_with_gaps_is_packed_in_its_final_shape():
    joined = torch.arange(24.0).view(2, 6, 2)
    (bucket,) = buckets([("q", joined[:, 1:4], [6, 2])], 1000, shared=False)
    assert bucket.shapes == [[6, 2]]
    assert torch.equal(bucket.content.view(torch.float32).view(6, 2), joined[:, 1:4].flatten(0, 1))


READ = """
import base64, io, pickle, sys, torch, torch.multiprocessing
d = pickle.load(io.BytesIO(base64.b64decode(sys.stdin.read())))
for m in d["metadata"]:
    print(m.name, d["flattened_tensor"][m.start_idx:m.end_idx].view(m.dtype).reshape(m.shape).double().sum().item())
"""


def test_another_process_reads_the_same_memory():
    torch.multiprocessing.set_sharing_strategy("file_system")
    sent = tensors(3, 7)
    (bucket,) = buckets(sent, 8000, shared=True)
    text = serialise(bucket)
    Careful(io.BytesIO(base64.b64decode(text))).load()
    out = subprocess.run(
        [sys.executable, "-c", READ], input=serialise(bucket), capture_output=True, text=True, check=True
    ).stdout
    for line, (name, tensor, _) in zip(out.splitlines(), sent, strict=True):
        assert line.split()[0] == name
        assert float(line.split()[1]) == tensor.double().sum().item()
    assert len(text) < 4000  # handles, not weights


def digest(*parts: torch.Tensor, zeros: int = 0) -> str:
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts) + bytes(zeros)).hexdigest()[:16]


def test_checksums_are_those_of_sglangs_joined_parameters():
    layer = "model.layers.0."
    names = (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    )
    t = {layer + n: torch.randn(4, 3) for n in names}
    t |= {"model.embed_tokens.weight": torch.randn(70, 3), "model.norm.weight": torch.randn(3)}
    q, k, v, gate, up = (t[layer + n] for n in names)
    assert server_checksums(reversed(t.items()), ServerLayout(vocab_size=70), "sha256") == {
        layer + "self_attn.qkv_proj.weight": digest(q, k, v),
        layer + "mlp.gate_up_proj.weight": digest(gate, up),
        "model.embed_tokens.weight": digest(t["model.embed_tokens.weight"], zeros=58 * 12),
        "model.norm.weight": digest(t["model.norm.weight"]),
    }
