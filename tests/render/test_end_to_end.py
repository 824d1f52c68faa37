"""Per family: a three-turn episode with a tool on the local engine, and the trainer's log-probs against the engine's.

The model is tiny and random, so it would never call a tool: what the engine draws is prescribed, what it computes is its own.
"""

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import numpy as np
import torch
from template_models import BY_NAME, MODELS, renderer, tokenizer

import agentrl.engine.local.scheduler as scheduler
from agentrl.engine.base import SamplingParams
from agentrl.engine.local.engine import LocalEngine
from agentrl.env import ToolEnv
from agentrl.reward import Scorer
from agentrl.rollout.env_instance import ThreadPools
from agentrl.rollout.episode import EpisodeRunner, Limits
from agentrl.tool import tool
from agentrl.train.megatron.trainer import MegatronTrainer
from agentrl.train.rows import make_rows
from agentrl.train.sample import to_samples
from agentrl.types import EpisodeSpec, Observation, Provenance, StopReason, Task

pytestmark = pytest.mark.slow
TEMPERATURE = 0.7
VOCABULARY = 6144


class Lookup(ToolEnv):
    """One tool; an answer ends it."""

    async def reset(self, task, *, seed):
        return Observation.of(task.prompt)

    @tool
    def search(self, query: str) -> str:
        """Look something up.

        Args:
            query: What for.
        """
        return f"about {query}: it is <|im_end|> 42"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Qwen3-shaped model with room for every family's vocabulary."""
    import transformers

    folder = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


async def episode(name, model, monkeypatch):
    """(trajectory, what the policy was made to say)."""
    family, ours = BY_NAME[name], renderer(name)
    added = ours.tokenizer.added
    call_end = added[family.call_end or family.end]
    sampled = [(*ours.tokenizer.encode(family.call("search", q)), call_end) for q in ("one", "two")]
    sampled.append((*ours.tokenizer.encode(family.say("it is 42")), added[family.end]))
    script = iter([i for ids in sampled for i in ids])

    def prescribed(logits, params, uniforms):
        assert len(params) == 1
        log_probs = torch.log_softmax(logits[0].float() / params[0].temperature, -1)
        token = next(script)
        return [token], [float(log_probs[token])]

    monkeypatch.setattr(scheduler, "sample", prescribed)
    engine = LocalEngine(model, decode=tokenizer(name).decode, max_running=2, threads=1)
    await engine.start()
    runner = EpisodeRunner(
        make_env=Lookup,
        env_class=Lookup,
        engine=engine,
        renderer=ours,
        scorer=Scorer([]),
        pools=ThreadPools(Lookup),
        limits=Limits(context_length=2048),
        sampling=SamplingParams(1, temperature=TEMPERATURE),
        seed=1,
    )
    try:
        trajectory = await runner.run(EpisodeSpec(Task("t", "What is it?"), 0, 0))
    finally:
        runner.close()
        await engine.close()
    return trajectory, sampled


@pytest.fixture(scope="module")
def trainer(model, tmp_path_factory):
    made = MegatronTrainer(model, run_dir=tmp_path_factory.mktemp("run"), threads=1, timeout_s=300)
    yield made
    made.close()


@pytest.mark.parametrize("name", [m.name for m in MODELS])
async def test_the_trainer_reads_what_the_engine_sampled(name, model, trainer, monkeypatch):
    trajectory, sampled = await episode(name, model, monkeypatch)
    assert trajectory.stop_reason is StopReason.TERMINATED, trajectory.cause
    assert len(trajectory.turns) == 3
    assert [c.arguments for t in trajectory.turns for c in t.action.calls] == [{"query": "one"}, {"query": "two"}]
    assert trajectory.answer == "it is 42"
    assert len(trajectory.segments) == 1, [t.info for t in trajectory.turns]
    spans = trajectory.segments[0].spans
    assert [s.ids for s in spans if s.provenance is Provenance.SAMPLED] == sampled
    (sample,) = to_samples(trajectory)
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    assert [t for t, m in zip(response, sample.loss_mask, strict=True) if m] == [i for ids in sampled for i in ids]
    (row,) = make_rows([sample], {sample.episode_id: 1.0})
    (log_probs,) = trainer.log_probs([row])
    sampled = row.weights > 0
    np.testing.assert_allclose(log_probs[sampled], row.rollout_log_probs[sampled], atol=1e-4)
