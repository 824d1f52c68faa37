"""Flags that users bring from slime, TRL and verl: accepted, or refused with advice that can be followed."""

import os
import re

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
from agentrl.cli.flag_advice import advice, flag_tables, our_name, verl_advice, why_without_effect
from agentrl.cli.flags import read_flags
from agentrl.cli.foreign_flags import own_names
from agentrl.cli.main import main, make_parser
from agentrl.config import FIELDS, build_config
from agentrl.config.describe import flag_names
from agentrl.core.redaction import redact
from agentrl.errors import ConfigError
from agentrl.reward import REWARDS
from agentrl.train.megatron.megatron_flags import megatron_flags, why_not_settable

PARSER, COMMANDS = make_parser()
SETTINGS = {flag[2:] for name in FIELDS for flag in flag_names(name)}
OPTIONS = {option[2:] for parser in COMMANDS.values() for action in parser._actions for option in action.option_strings}
TABLES = flag_tables()
ACCEPTED = SETTINGS | OPTIONS | set(megatron_flags())

SLIME = """
actor-num-nodes actor-num-gpus-per-node rollout-num-gpus rollout-num-gpus-per-engine colocate num-gpus-per-node offload hf-checkpoint load
save save-interval ref-load prompt-data input-key label-key metadata-key tool-key apply-chat-template apply-chat-template-kwargs
rollout-shuffle rollout-seed num-rollout num-epoch rollout-batch-size n-samples-per-prompt global-batch-size num-steps-per-rollout
micro-batch-size use-dynamic-batch-size balance-data max-tokens-per-gpu log-probs-max-tokens-per-gpu advantage-estimator use-kl-loss
kl-loss-coef kl-loss-type kl-coef entropy-coef eps-clip eps-clip-high eps-clip-c value-clip gamma lambd calculate-per-token-loss
normalize-advantages disable-grpo-std-normalization disable-rewards-normalization use-tis tis-threshold tis-clip tis-clip-low
true-on-policy-mode use-rollout-logprobs rollout-temperature rollout-top-p rollout-top-k rollout-max-response-len rollout-max-context-len
rollout-max-prompt-len rollout-stop rollout-stop-token-ids over-sampling-batch-size dynamic-sampling-filter-path partial-rollout
async-buffer-size update-weights-interval eval-interval eval-prompt-data eval-config n-samples-per-eval-prompt eval-temperature eval-top-p
eval-top-k eval-max-response-len eval-reward-key custom-generate-function-path custom-rm-path custom-loss-function-path
rollout-function-path group-rm rm-type reward-key max-turns use-fault-tolerance rollout-health-check-interval recompute-activations
recompute-granularity recompute-method recompute-num-layers sequence-parallel tensor-model-parallel-size pipeline-model-parallel-size
context-parallel-size expert-model-parallel-size expert-tensor-parallel-size num-data-workers streaming-data lr lr-decay-style weight-decay
adam-beta1 adam-beta2 optimizer clip-grad optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer seed
debug-rollout-only debug-train-only save-debug-rollout-data load-debug-rollout-data use-wandb wandb-project wandb-group use-mlflow wandb-key
wandb-team use-tensorboard attention-dropout hidden-dropout accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32
attention-backend train-backend update-weight-buffer-size rollout-external-engine-addrs swiglu num-layers hidden-size ffn-hidden-size
num-attention-heads group-query-attention num-query-groups use-rotary-position-embeddings disable-bias-linear normalization norm-epsilon
rotary-base vocab-size kv-channels qk-layernorm add-qkv-bias untie-embeddings-and-output-weights max-position-embeddings rotary-percent
offload-train offload-rollout distributed-backend distributed-timeout-minutes train-env-vars update-weight-mode update-weight-transport
update-weight-disk-dir update-weight-disk-keep-files update-weight-delta-encoding custom-model-provider-path recompute-loss-function
log-probs-chunk-size only-train-params-name-list freeze-params-name-list model-name flush-cache-interval rollout-skip-special-tokens
mask-offpolicy-in-partial-rollout custom-rollout-log-function-path custom-eval-rollout-log-function-path buffer-filter-path
rollout-data-postprocess-path rollout-data-transport data-source-path multimodal-keys start-rollout-id balance-by-flops
eval-function-path skip-eval-before-train eval-input-key eval-label-key eval-tool-key eval-max-prompt-len eval-min-new-tokens
eval-max-context-len ref-ckpt-step async-save no-save-optim save-hf num-critic-only-steps megatron-config-path custom-advantage-function-path
use-unbiased-kl ref-update-interval use-rollout-entropy get-mismatch-metrics reset-optimizer-states custom-tis-function-path
use-routing-replay use-opsm opsm-delta use-opd opd-type opd-kl-coef opd-teacher-load wandb-mode wandb-dir wandb-host wandb-run-id
disable-wandb-random-suffix log-multi-turn log-passrate log-reward-category log-correct-samples tb-project-name tb-experiment-name
save-debug-train-data dump-details memory-snapshot-dir memory-recorder record-memory-history check-weight-update-equal http-proxy
use-distributed-post rm-url custom-reward-post-process-path custom-convert-samples-to-train-data-path rollout-buffer-url
fetch-trajectory-retry-times min-batch-collection-ratio rollout-task-type loss-mask-type data-pad-size-multiplier
rollout-sample-filter-path rollout-all-samples-process-path custom-megatron-init-path mtp-num-layers mtp-loss-scaling-factor
enable-mtp-training ci-test custom-config-path padded-vocab-size
""".split()
"""Flags of slime and of its scripts."""

TRL = """
model-name-or-path dataset-name output-dir learning-rate num-generations per-device-train-batch-size gradient-accumulation-steps
num-train-epochs max-steps max-prompt-length max-completion-length temperature top-p top-k beta epsilon epsilon-high delta num-iterations
loss-type scale-rewards importance-sampling-level mask-truncated-completions use-vllm vllm-mode vllm-gpu-memory-utilization reward-funcs
reward-weights lr-scheduler-type warmup-ratio warmup-steps max-grad-norm weight-decay adam-beta1 adam-beta2 adam-epsilon logging-steps
save-steps save-strategy save-total-limit eval-steps eval-strategy report-to run-name bf16 fp16 gradient-checkpointing deepspeed
use-peft lora-r lora-alpha load-in-4bit torch-dtype attn-implementation max-length packing assistant-only-loss resume-from-checkpoint
log-completions seed
""".split()


def read(*words):
    return read_flags(*PARSER.parse_known_args(["train", *own_names(words)]))


PROMISED = """
actor-num-nodes actor-num-gpus-per-node rollout-num-gpus rollout-num-gpus-per-engine colocate hf-checkpoint load save save-interval
prompt-data input-key label-key apply-chat-template num-rollout rollout-batch-size n-samples-per-prompt global-batch-size
num-steps-per-rollout micro-batch-size max-tokens-per-gpu advantage-estimator use-kl-loss kl-loss-coef kl-loss-type entropy-coef
eps-clip eps-clip-high calculate-per-token-loss normalize-advantages use-tis tis-threshold true-on-policy-mode rollout-temperature
rollout-max-response-len rollout-max-context-len over-sampling-batch-size partial-rollout async-buffer-size update-weights-interval
eval-interval eval-prompt-data n-samples-per-eval-prompt eval-temperature custom-generate-function-path custom-rm-path group-rm
rm-type max-turns use-fault-tolerance recompute-activations sequence-parallel num-data-workers streaming-data lr seed
debug-rollout-only debug-train-only save-debug-rollout-data load-debug-rollout-data metadata-key tool-key
""".split()
"""Flags that users of slime bring along, each of which must have a decision."""


def test_no_flag_of_slime_and_trl_is_unknown(no_service):
    for name in {*SLIME, *TRL, *PROMISED}:
        if name in TABLES.words:
            assert read(f"--{name}") == read(*TABLES.words[name]) != {}
            continue
        if name in TABLES.environment:
            assert read(f"--{name}", "1") == {"megatron": {}}
            assert os.environ[TABLES.environment[name]] == "1"
            continue
        if our_name(name) in ACCEPTED:
            assert advice(name) is None
            continue
        if why_without_effect(name, ["1"]):
            assert read(f"--{name}", "1") == {"megatron": {}}
            continue
        with pytest.raises(ConfigError) as e:
            read(f"--{name}", "1")
        assert str(e.value).startswith(f"--{name} ")
        assert (advice(name) or why_not_settable(name)) in str(e.value)


def test_all_wrong_flags_are_reported_at_once():
    with pytest.raises(ConfigError) as e:
        read(
            "--lr",
            "-1",
            "--wandb-name",
            "x",
            "--unheard-of",
            "3",
            "--kl-loss-type",
            "k9",
            "--tensor-model-parallel-size",
            "z",
        )
    first, *lines = str(e.value).splitlines()
    assert first == "5 settings cannot be used:"
    flags = [line.split()[0] for line in lines]
    assert {*flags, "unknown"} == {"--lr", "--wandb-name", "unknown", "--kl-loss-type", "--tensor-model-parallel-size"}
    assert "  unknown flag --unheard-of" in str(e.value)


def test_flags_without_effect_are_accepted_and_named_once_for_each_reason(caplog):
    words = [
        "--balance-data",
        "--swiglu",
        "--norm-epsilon",
        "1e-6",
        "--use-dynamic-batch-size",
        "--weight-decay",
        "0.5",
    ]
    assert read(*words) == {"megatron": {"weight_decay": 0.5}}
    assert "--swiglu, --norm-epsilon: without effect, since the model's config.json decides it" in caplog.messages
    assert len(caplog.messages) == 3
    with pytest.raises(ConfigError, match="--nnodes is not accepted: give --actor-num-nodes"):
        read("--nnodes", "2")


QWEN2_3B = """
--swiglu --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16 --use-rotary-position-embeddings
--disable-bias-linear --add-qkv-bias --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --group-query-attention
--num-query-groups 2 --vocab-size 151936
"""
QWEN3_4B = """
--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention --num-query-groups 8
--use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 5000000
--vocab-size 151936 --kv-channels 128 --qk-layernorm
"""
COMMON = """
--hf-checkpoint M --ref-load M_torch_dist --load RUN --save RUN --save-interval 20 --rollout-shuffle --num-rollout 3000
--n-samples-per-prompt 8 --balance-data --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1
--context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full
--recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --advantage-estimator grpo
--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam
--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --sglang-mem-fraction-static 0.7
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash
--actor-num-nodes 1 --colocate
"""
WANDB = "--use-wandb --wandb-project slime-dev --wandb-group G --wandb-key 0123456789"
SCRIPTS = {
    "search-r1": f"""{COMMON} {QWEN2_3B} {WANDB} --prompt-data nq_search/train.parquet --input-key prompt --label-key reward_model
        --apply-chat-template --rollout-batch-size 64 --rollout-max-response-len 500 --rollout-temperature 1.0 --global-batch-size 512
        --rollout-num-gpus-per-engine 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 4
        --custom-generate-function-path generate_with_search.generate --custom-rm-path generate_with_search.reward_func""",
    "retool": f"""{COMMON} {QWEN3_4B} {WANDB} --prompt-data dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template
        --reward-key score --rollout-batch-size 32 --rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size 256
        --eval-interval 20 --eval-prompt-data aime aime-2024.jsonl --n-samples-per-eval-prompt 16 --eval-max-response-len 16384
        --eval-top-p 1 --rollout-num-gpus-per-engine 2 --actor-num-gpus-per-node 4
        --custom-generate-function-path generate_with_retool.generate --custom-rm-path generate_with_retool.reward_func""",
    "tau-bench": f"""{COMMON} {QWEN3_4B} --prompt-data retail_train_tasks.jsonl --input-key index --rollout-batch-size 32
        --rollout-max-response-len 1024 --rollout-temperature 0.8 --global-batch-size 256
        --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std --eval-interval 5
        --eval-prompt-data retail-dev retail_dev_tasks.jsonl --n-samples-per-eval-prompt 1 --eval-max-response-len 1024 --eval-top-k 1
        --rollout-num-gpus-per-engine 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 2
        --custom-generate-function-path generate_with_tau.generate""",
}
"""The flags of slime's scripts examples/NAME/*.sh, with those of its file for the model and of its commented group for W&B."""
TAU2 = "--no-load-optim --custom-reward-post-process-path reward.tau2_reward_post_process --wandb-exp-name x"
"""What slime's script for tau2-bench gives besides."""


@pytest.fixture
def no_service(monkeypatch):
    """W&B's variables are unset again after the test."""
    for name in TABLES.environment.values():
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_flags_of_slimes_scripts_are_accepted_as_they_are(script, no_service):
    config = build_config(read(*SCRIPTS[script].split()))
    assert config.train.kl_loss_type == "low_var_kl"
    assert config.env.custom_generate_function_path.endswith("generate")
    assert (config.run.run, config.engine.engine, config.engine.colocate) == ("RUN", "sglang", True)
    assert config.megatron["tensor_model_parallel_size"] == 2
    assert config.sglang == {"mem_fraction_static": 0.7}
    if script != "tau-bench":
        assert (config.run.trackers, config.run.tracking_project) == (("wandb",), "slime-dev")
        assert (os.environ["WANDB_RUN_GROUP"], os.environ["WANDB_API_KEY"]) == ("G", "0123456789")
        assert redact("the key is 0123456789") == "the key is ***"


def test_one_answer_names_all_that_the_script_for_tau2_bench_gives_and_that_is_not_taken(no_service):
    with pytest.raises(ConfigError) as e:
        read(*SCRIPTS["tau-bench"].split(), *TAU2.split(), "--metadata-key", "metadata", "--wandb-group")
    assert [line.split()[0] for line in str(e.value).splitlines()[1:]] == [
        "--no-load-optim", "--custom-reward-post-process-path", "--wandb-exp-name", "--wandb-group"
    ]  # fmt: skip


def test_settings_of_servers_choose_the_engine_that_has_them_unless_one_is_named():
    for words in (["--colocate"], ["--rollout-num-gpus", "2"], ["--sglang-mem-fraction-static", "0.7"]):
        assert build_config(read(*words)).engine.engine == "sglang"
        with pytest.raises(ConfigError, match="needs --engine sglang"):
            build_config(read(*words, "--engine", "local"))
    assert build_config(read("--colocate", "false")).engine.engine == "local"


def test_the_command_line_takes_and_refuses_them(here, capsys):
    assert main(["train", "--num_generations", "0"]) == 2
    assert capsys.readouterr().err == "agentrl train: --n-samples-per-prompt must be at least 1, found 0\n"
    assert main(["train", "--wandb-name", "x"]) == 2
    assert capsys.readouterr().err.startswith("agentrl train: --wandb-name is not accepted: give --trackers wandb")


@pytest.mark.parametrize("name", TABLES.same)
def test_a_flag_that_means_one_of_ours_sets_it(name):
    target = TABLES.same[name]
    assert target in ACCEPTED
    if target not in SETTINGS | set(megatron_flags()):
        return  # an option of a command
    assert name not in ACCEPTED
    value = {
        "model-name-or-path": "m",
        "output-dir": "o",
        "use-tensorboard": "false",
        "adv-estimator": "rloo",
        "top-p": "0.5",
        "report-to": "mlflow",
        "target-modules": "q_proj",
    }.get(name, "3")
    for flag in (f"--{name}", f"--{name.replace('-', '_')}"):
        assert read(flag, value) == read(f"{flag}={value}") == read(f"--{target}", value) != {}


@pytest.mark.parametrize("text", sorted({*TABLES.refused.values(), *TABLES.prefixes.values()}))
def test_advice_never_names_a_flag_that_is_itself_refused(text):
    for name in re.findall(r"--([a-z][a-z0-9-]*)", text):
        assert name in ACCEPTED or name.startswith("sglang-"), name
        assert advice(name) is None, name
    for command in re.findall(r"`agentrl ([a-z]+)", text):
        assert command in COMMANDS, command


@pytest.mark.parametrize("name", TABLES.without_effect)
def test_flags_without_effect_are_no_settings(name):
    assert name.partition("=")[0] not in {*ACCEPTED, *TABLES.same}
    assert ("=" in name) or name not in TABLES.refused


@pytest.mark.parametrize("key", TABLES.values, ids="-".join)
def test_values_of_other_programs_are_refused_with_the_value_to_give(key):
    name, value = key
    with pytest.raises(ConfigError, match=f"^--.* {value} is not accepted: {TABLES.values[key]}"):
        read(f"--{name}", value)
    if name == "reward":
        return  # any name may be registered
    with pytest.raises(ConfigError, match="must be one of"):
        build_config({name: value})
    given = re.findall(r"give (\w+)", TABLES.values[key])
    for v in given:
        build_config({name: v})


def test_the_tables_do_not_refuse_what_is_accepted():
    assert not TABLES.refused.keys() & ACCEPTED
    assert not TABLES.refused.keys() & TABLES.same.keys()
    assert [name for name in sorted(ACCEPTED) if advice(name)] == []
    assert not {value for setting, value in TABLES.values if setting == "reward"} & set(REWARDS.names())


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("data.train_files=a.parquet", "--prompt-data"),
        ("data.val_files=a.parquet", "--eval-prompt-data"),
        ("data.train_batch_size=8", "--rollout-batch-size"),
        ("data.max_response_length=8", "--rollout-max-response-len"),
        ("actor_rollout_ref.model.path=m", "--hf-checkpoint"),
        ("actor_rollout_ref.actor.optim.lr=1", "--lr"),
        ("actor_rollout_ref.actor.use_kl_loss=True", "--use-kl-loss"),
        ("actor_rollout_ref.actor.kl_loss_coef=1", "--kl-loss-coef"),
        ("actor_rollout_ref.actor.clip_ratio_high=0.3", "--eps-clip-high"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "--global-batch-size"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "--max-tokens-per-gpu"),
        ("actor_rollout_ref.rollout.n=8", "--n-samples-per-prompt"),
        ("actor_rollout_ref.rollout.temperature=1", "--rollout-temperature"),
        ("actor_rollout_ref.rollout.name=sglang", "--engine"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "--rollout-num-gpus-per-engine"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.5", "--sglang-mem-fraction-static"),
        ("algorithm.adv_estimator=grpo", "--advantage-estimator"),
        ("trainer.n_gpus_per_node=8", "--actor-num-gpus-per-node"),
        ("trainer.total_epochs=3", "--num-rollout"),
        ("trainer.save_freq=3", "--save-interval"),
        ("trainer.test_freq=3", "--eval-interval"),
        ("+custom_reward_function.path=r.py", "--reward"),
        ("unheard.of=3", "--help-all"),
    ],
)
def test_keys_of_verl_are_refused_with_the_flag_to_give(key, flag):
    assert flag in verl_advice(key, ACCEPTED)
    with pytest.raises(ConfigError, match=re.escape(flag)) as e:
        read(key)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("word", ["maybe", "a=b", "3.5", "./a.b=c", "x.jsonl"])
def test_other_words_are_not_keys_of_verl(word):
    assert verl_advice(word, ACCEPTED) is None


@pytest.mark.parametrize("word", ["--num_rollout", "--num-rollout"])
def test_flags_may_be_written_with_underscores(word):
    assert own_names([word, "a_b", f"{word}=a_b"]) == ["--num-rollout", "a_b", "--num-rollout=a_b"]
