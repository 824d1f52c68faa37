"""Record the run folder beside this file: `python tests/recorded/make.py`. It is kept as it was made; make it again only if the format changes.

A tiny random model trains for two rollouts; `run/` is the run folder after them, with its checkpoint. The run then continues to four rollouts;
`expected.json` holds the metrics and the SHA-256 of the weights that came out. Paths of this folder are written as HERE.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ASSET = HERE.parents[1] / "agentrl/assets/search_r1_3m"
FLAGS = (
    "--num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 4 --num-steps-per-rollout 2 --save-interval 2 --keep-checkpoints 1 "
    "--eval-interval 2 --eval-limit 2 --lr 1e-3 --use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01 --max-tokens-per-turn 8 "
    "--rollout-max-response-len 80 --rollout-max-context-len 160 --threads 1 --actor-num-gpus-per-node 1 --tensorboard false --seed 7 "
    "--date 2026-01-01 --max-invalid-actions 8"
).split()


def make_model(folder: Path) -> None:
    import torch
    import transformers

    shutil.rmtree(folder, ignore_errors=True)
    config = transformers.Qwen3Config(
        vocab_size=2048,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).float()
    with torch.no_grad():  # a common direction of all embeddings, towards which the end token points: about one token in five is an end token
        model.model.embed_tokens.weight += 0.3
        model.lm_head.weight[2] = 0.4
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSET / name, folder)


def agentrl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "agentrl.cli", *words], check=True)


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> str:
    return hashlib.sha256((run / "hf/model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    make_model(HERE / "model")
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        agentrl("train", "--env", str(HERE / "letters.py"), "--model", str(HERE / "model"), "--run", str(run), *FLAGS)
        shutil.rmtree(HERE / "run", ignore_errors=True)
        shutil.copytree(run, HERE / "run", ignore=shutil.ignore_patterns("hf", "*.log", "curve.png"))
        config = HERE / "run/config.toml"
        config.write_text(config.read_text().replace(str(HERE), "HERE").replace(str(run), "RUN"))
        agentrl("train", "--resume", str(run), "--num-rollout", "4")
        expected = {"metrics": rows(run), "weights": weights(run)}
        (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
