"""The commonest input errors, from the command line to the whole sentence: where, what was expected, what was found, what to do."""

import json

import pytest

from agentrl.cli.main import main

ROW = '{"question": "q", "golden_answers": ["a"]}'


def prepare(folder):
    """The files that the command lines below name."""
    (folder / "no_json.jsonl").write_text(f"{ROW}\n{ROW[:-1]}\n")
    (folder / "no_column.jsonl").write_text('{"questions": "q"}\n')
    (folder / "bad.toml").write_text("[train\n")
    (folder / "misplaced.toml").write_text("[train]\nrollout_batch_size = 3\n")
    (folder / "misspelled.toml").write_text("[train]\nlearning_rat = 3\n")
    (folder / "section.toml").write_text("[trian]\nlr = 3\n")
    (folder / "megatron.toml").write_text("[megatron]\nwieght_decay = 3\n")
    (folder / "taken").mkdir()
    (folder / "taken" / "file").touch()
    (folder / "empty").mkdir()
    (folder / "stopped" / "checkpoints").mkdir(parents=True)
    (folder / "stopped" / "config.toml").touch()
    bare = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    (folder / "mute").mkdir()
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (folder / "mute" / name).write_bytes((folder / "model" / name).read_bytes())
    (folder / "mute" / "tokenizer_config.json").write_text(json.dumps(bare | {"chat_template": None}))


ERRORS = {
    # names and values of flags
    "train --rollout-batchsize 3": (
        "train: unknown flag --rollout-batchsize; did you mean 'rollout-batch-size' or 'micro-batch-size' or "
        "'sft-batch-size'?"
    ),
    "train --xyzzy 3": "train: unknown flag --xyzzy; `agentrl train --help-all` lists all flags",
    "train --rm-type dapo": (
        "train: --reward dapo is not accepted: write a function with @reward and give --reward file.py:function; em and f1 "
        "score short answers, math answers of mathematics"
    ),
    "train --debug-train-only": "train: --debug-train-only trains on recorded episodes; give --load-debug-rollout-data RUN",
    "train --load nowhere --save elsewhere": (
        "train: a run continues in its own folder, but --load is nowhere and --save (--run) is elsewhere; give both the same "
        "folder, or start a new run from its weights with --hf-checkpoint RUN/hf"
    ),
    "train --load model": (
        "train: --load model does not hold a run of agentrl; to start from the weights of a model give --hf-checkpoint DIR"
    ),
    "train --load stopped --lr 1": (
        "train: --load continues with the run's own settings; leave out --lr, or start a new run"
    ),
    "train --num-rollout": "train: --num-rollout takes one value, found none",
    "train --num-rollout many": "train: --num-rollout must be an integer, found 'many'",
    "train --lr -1": "train: --lr must be at least 0, found -1",
    "train --lr nan": "train: --lr must be a finite number, found nan",
    "train --rollout-temperature 0": (
        "train: --rollout-temperature must be above 0, found 0: greedy sampling has no distribution to learn from"
    ),
    "train --advantage-estimator gae": "train: --advantage-estimator gae is not accepted: give ppo",
    "train --advantage-estimator grop": (
        "train: --advantage-estimator must be one of grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gspo, cispo, ppo, "
        "gigpo, branch_rloo, distillation, or file.py:function, found grop"
    ),
    "train --env search_r1 --advantage-estimator gspo": (
        "train: --advantage-estimator gspo weighs episodes equally, whatever their length; give --calculate-per-token-loss false"
    ),
    "train --tis-clip-low 3 --use-tis": (
        "train: --tis-clip-low 3.0 is above --tis-threshold 2.0; no ratio is between them"
    ),
    "train --proximal-log-probs rollout --use-tis": (
        "train: --use-tis compares the trainer's log-probabilities with the engine's; with --proximal-log-probs rollout there are only the "
        "engine's: give --proximal-log-probs forward"
    ),
    "train --proximal-log-probs interpolate": (
        "train: --proximal-log-probs interpolate has no effect with one optimizer step per rollout, whose old log-probabilities cost nothing; "
        "leave it out, or give --num-steps-per-rollout"
    ),
    "train --tensorboard maybe": "train: unexpected 'maybe'; flags begin with --",
    "train extra": "train: unexpected 'extra'; flags begin with --",
    "train --env-arg topk": "train: --env-arg takes NAME=VALUE, found 'topk'",
    "train --weight-decay much": "train: --weight-decay must be a number, found 'much'",
    # settings that contradict each other
    "train --rollout-batch-size 3 --global-batch-size 16": (
        "train: rollout_batch_size × n_samples_per_prompt must equal global_batch_size × "
        "num_steps_per_rollout: 3 × 8 = 24, but 16 × 1 = 16"
    ),
    "train --rollout-top-p 0.9": (
        "train: with --rollout-top-p or --rollout-top-k, episodes are sampled from another distribution than "
        "the trainer's; give --allow-truncated-sampling to train on them"
    ),
    "train --kl-loss-coef 0.1": "train: --kl-loss-coef has no effect without --use-kl-loss; add --use-kl-loss",
    "train --engine local --colocate": "train: --colocate needs --engine sglang (the engine is local)",
    "train --engine local --sglang-mem-fraction-static 0.8": (
        "train: --sglang-mem-fraction-static needs --engine sglang (the engine is local)"
    ),
    "train --env search_r1 --model model --n-samples-per-prompt 1": (
        "train: --n-samples-per-prompt 1 trains nothing: the advantage of an episode is its difference from the "
        "others of its group; give at least 2 (or --kl-loss-coef or --entropy-coef, to train on these terms alone)"
    ),
    "train --env search_r1 --model model --tensor-model-parallel-size 3 --actor-num-gpus-per-node none": (
        "train: tensor_model_parallel_size 3 does not divide the model's 2 key-value heads"
    ),
    "train --eval-prompt-data held": (
        "train: --eval-prompt-data takes pairs of NAME and PATH, found an odd number of values: 1"
    ),
    # environments and rewards
    "train --env search_r2": "train: unknown env 'search_r2'; did you mean 'search_r1'?",
    "train --env nowhere.py": (
        "train: env 'nowhere.py': cannot import nowhere.py: FileNotFoundError: no such file: HERE/nowhere.py"
    ),
    "train --env search_r1 --model model --env-arg topc=3": (
        "train: environment search_r1 takes no argument 'topc'; did you mean 'topk'?"
    ),
    "train --env search_r1 --model model --reward emm": "train: unknown reward 'emm'; did you mean 'em'?",
    "train": (
        "train: no environment is given; give --env NAME|FILE.py (search_r1 is the example), or tasks with --prompt-data "
        "and their --reward NAME|FILE.py"
    ),
    "rollout": (
        "rollout: no environment is given; give --env NAME|FILE.py (search_r1 is the example), or tasks with --prompt-data "
        "and their --reward NAME|FILE.py"
    ),
    "eval --model model": (
        "eval: no environment is given; give --env NAME|FILE.py (search_r1 is the example), or tasks with --prompt-data or "
        "--eval-prompt-data and their --reward NAME|FILE.py"
    ),
    "train --model model --prompt-data no_column.jsonl": (
        "train: nothing scores the answers to the tasks; give --reward NAME|FILE.py, or an environment with --env"
    ),
    # models
    "train --prompt-data no_column.jsonl --reward em": (
        "train: no model is given; give --model with a folder, a hub id or the name of an embedded model (search_r1_3m, "
        "smollm2-135m)"
    ),
    "sft empty.jsonl": (
        "sft: no model is given; give --model with a folder, a hub id or the name of an embedded model (search_r1_3m, "
        "smollm2-135m)"
    ),
    "train --env search_r1 --model nowhere": (
        "train: --hf-checkpoint nowhere: no such folder, and no embedded model of that name (search_r1_3m, "
        "smollm2-135m)"
    ),
    "train --env search_r1 --model empty": "train: --hf-checkpoint HERE/empty: the folder has no config.json",
    "train --env search_r1 --model mute": (
        "train: HERE/mute has no chat template; add one to tokenizer_config.json (key chat_template) or "
        "chat_template.jinja"
    ),
    # files
    "train --env search_r1 --model model --prompt-data nowhere.jsonl": "train: no data file nowhere.jsonl",
    "train --env search_r1 --model model --prompt-data no_json.jsonl": (
        "train: HERE/no_json.jsonl, line 2: not JSON: unexpected end of data: line 2 column 1 (char 42)"
    ),
    "train --env search_r1 --model model --prompt-data no_column.jsonl": (
        "train: HERE/no_column.jsonl, line 1: no column 'question'; did you mean 'questions'?; the columns are questions; set "
        "--input-key and --label-key"
    ),
    "train --config nowhere.toml": "train: nowhere.toml: cannot be read: No such file or directory",
    "train --config bad.toml": (
        "train: bad.toml: not TOML: Expected ']' at the end of a table declaration (at line 1, column 7)"
    ),
    "train --config misplaced.toml": (
        "train: misplaced.toml: unknown key 'rollout_batch_size' in [train]; it belongs in [rollout]"
    ),
    "train --config misspelled.toml": (
        "train: misspelled.toml: unknown key 'learning_rat' in [train]; known: actor_num_gpus_per_node, "
        "actor_num_nodes, advantage_estimator, calculate_per_token_loss, critic_load, critic_lr, entropy_coef, eps_clip, eps_clip_c, "
        "eps_clip_high, gamma, gigpo_step_weight, …"
    ),
    "train --config section.toml": "train: section.toml: unknown section [trian]; did you mean 'train'?",
    "train --env search_r1 --model model --config megatron.toml": (
        "train: [megatron]: megatron-core has no setting 'wieght_decay'; did you mean 'weight_decay'?"
    ),
    # runs and recorded episodes
    "train --env search_r1 --model model --run taken": "train: the run folder taken already exists; choose another with --run",
    "train --resume nowhere": "train: nowhere is not a run folder: it has no config.toml",
    "train --resume stopped --lr 1": (
        "train: --resume continues with the run's own settings; leave out --lr, or start a new run"
    ),
    "train --train-only nowhere --model model": "train: no episodes at nowhere: it does not exist",
    "replay nowhere": "replay: no episodes at nowhere: it does not exist",
    "replay empty": "replay: empty: holds no episodes (no *.jsonl.zst files and no folder episodes/)",
    "sft nowhere --model model": "sft: no data file nowhere",
    "check": "check: the following arguments are required: --env",
    "check --env search_r1 --episodes 0": "check: --episodes must be at least 1, found 0",
    "help --learning-ratio": "help: unknown flag --learning-ratio; did you mean 'learning-rate' or 'clip-ratio' or 'warmup-ratio'?",
    "train --ref-update-interval 2": (
        "train: --ref-update-interval is not accepted: the reference model is a frozen copy of --hf-checkpoint, kept with "
        "--use-kl-loss; leave it out"
    ),
    "train --wandb-name x": (
        "train: --wandb-name is not accepted: give --trackers wandb and --tracking-project; the key and the rest are W&B's "
        "environment variables, such as WANDB_API_KEY"
    ),
    "train actor_rollout_ref.rollout.n=8": (
        "train: actor_rollout_ref.rollout.n=8: agentrl has flags, not verl's keys; give --n-samples-per-prompt"
    ),
    "train --bf16": "train: --bf16 cannot be set: it follows from --dtype",
    "train --env search_r1 --sft-epochs 3": (
        "train: --sft-epochs has no effect in `agentrl train`; it is for `agentrl sft`; leave it out"
    ),
    "sft empty.jsonl --model model --num-rollout 3": (
        "sft: --num-rollout has no effect in `agentrl sft`, which plays no episodes and has no rewards; leave it out"
    ),
    "train --tis-threshold 3": "train: --tis-threshold has no effect without --use-tis; add --use-tis",
}


@pytest.mark.parametrize("line", ERRORS)
def test_the_sentence(line, here, model, capsys):
    prepare(here)
    assert main(line.split()) == 2
    output = capsys.readouterr()
    assert output.err.replace(str(here), "HERE") == f"agentrl {ERRORS[line]}\n"
    assert output.out == ""
    assert not (here / "runs").exists()
