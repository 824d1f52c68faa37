"""examples/black_box: an agent on the OpenAI SDK gives, on the embedded policy, the tokens of the native environment; the commands take it."""

from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.store import exactness_violations, read_episodes
from agentrl.train.sample import to_samples

BLACK_BOX = Path(__file__).parents[2] / "examples/black_box/search.py"
SMALL = "--num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 3 --tensorboard false".split()


@pytest.mark.slow
def test_a_black_box_gives_the_tokens_of_the_native_environment_and_its_run_replays(tmp_path, capsys):
    episodes = {}
    for name, env in (("native", "search_r1"), ("black", str(BLACK_BOX))):
        assert main(["rollout", "--env", env, "--run", str(tmp_path / name), *SMALL]) == 0
        episodes[name] = list(read_episodes(tmp_path / name / "episodes"))
    native, black = episodes["native"], episodes["black"]
    assert len(black) == len(native) == 6
    assert max(len(t.turns) for t in black) > 1
    for a, b in zip(native, black, strict=True):
        assert [s.spans for s in a.segments] == [s.spans for s in b.segments]
        assert [s.loss_mask for s in to_samples(a)] == [s.loss_mask for s in to_samples(b)]
        assert (a.rewards, a.score, a.answer) == (b.rewards, b.score, b.answer)
        assert [t.seed for t in a.turns] == [t.seed for t in b.turns]
    assert exactness_violations(black) == 0
    run = str(tmp_path / "black")
    assert main(["replay", run, "--workers", "1"]) == 0
    assert "6 episodes replayed: identical" in capsys.readouterr().out
    assert main(["fork", run, black[0].episode_id, "--turn", "1"]) == 0
    assert "identical" in capsys.readouterr().out
    assert main(["check", "--env", str(BLACK_BOX)]) == 2


@pytest.mark.full
def test_training_a_black_box_gives_the_weights_of_training_the_native_environment(tmp_path):
    few = (
        "--num-rollout 3 --rollout-batch-size 6 --n-samples-per-prompt 4 --tensorboard false --eval-interval 0".split()
    )
    alone = "--actor-num-gpus-per-node 1 --lr-warmup-rollouts 0".split()
    for name, env in (("native", "search_r1"), ("black", str(BLACK_BOX))):
        assert main(["train", "--env", env, "--run", str(tmp_path / name), *few, *alone]) == 0
    native, black = (tmp_path / name for name in ("native", "black"))
    assert (black / "metrics.jsonl").read_bytes() == (native / "metrics.jsonl").read_bytes()
    assert (black / "hf/model.safetensors").read_bytes() == (native / "hf/model.safetensors").read_bytes()
