"""Functions written for slime run as they are; the tokens that they return are compared with those that the engine sampled."""

import json
from pathlib import Path

import pytest
from doubles import FakeEngine

from agentrl.cli.main import main
from agentrl.errors import ConfigError
from agentrl.render import Tokenizer
from agentrl.store import exactness_violations, read_episodes
from agentrl.train.sample import to_samples
from agentrl.types import Provenance, StopReason

HERE = Path(__file__).parent
SEARCH, RETOOL, TAU = (HERE / f"generate_with_{name}.py" for name in ("search", "retool", "tau"))
CALLS = ["I look. <search>capital of france</search>", "<answer>Paris</answer>"]
CODE = ["<code>20+22</code>", "Answer: 42"]


@pytest.fixture
def here(tokenizer_dir, tmp_path, monkeypatch):
    """A working directory with tasks, and a model folder without weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentrl.run.components.Components.require_weights", lambda self: None)
    (tokenizer_dir / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "model_type": "qwen2"}))
    row = {"prompt": [{"role": "user", "content": "capital of france?"}], "label": "42"}
    row["reward_model"] = {"ground_truth": {"target": ["Paris"]}}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(2)))
    return tokenizer_dir


@pytest.fixture
def play(here, monkeypatch):
    """Record one rollout of two groups with an engine that follows a script; its episodes."""

    def run(script, *words, status=0):
        engines = []

        def engine(self, *_):
            engines.append(FakeEngine(self.renderer, script))
            return engines[-1]

        monkeypatch.setattr("agentrl.run.components.Components.engine", engine)
        given = ["rollout", "--model", str(here), "--prompt-data", "tasks.jsonl", "--run", "run", "--num-rollout", "1"]
        sizes = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--tensorboard", "false"]
        assert main([*given, *sizes, *words]) == status
        return list(read_episodes(Path("run/episodes"))), engines[-1]

    return run


def provenances(segment):
    return [s.provenance.name for s in segment.spans]


def test_search_r1_plays_by_text_and_its_tokens_are_those_that_were_sampled(play):
    words = ["--custom-generate-function-path", f"{SEARCH}:generate", "--custom-rm-path", f"{SEARCH}:reward_func"]
    episodes, engine = play(CALLS, *words, "--label-key", "reward_model")
    assert [t.stop_reason for t in episodes] == [StopReason.TERMINATED] * 4
    assert {t.score for t in episodes} == {1.0}
    assert exactness_violations(episodes) == 0
    for t in episodes:
        (segment,) = t.segments
        assert provenances(segment) == ["PROMPT", "SAMPLED", "OBSERVATION", "SAMPLED"]
        sampled = [s for s in segment.spans if s.provenance is Provenance.SAMPLED]
        decoded = [engine.renderer.tokenizer.decode(s.ids) for s in sampled]
        assert decoded == [f"{text}<|im_end|>" for text in CALLS]
        assert all(s.log_probs and s.policy_version == 3 for s in sampled)
        (sample,) = to_samples(t)
        assert sum(sample.loss_mask) == t.sampled_tokens
        second = next(r for r in engine.requests if r.session == t.episode_id and r.turn == 1)
        assert list(second.ids) == segment.ids[: len(second.ids)], "the text was not tokenised again"
        assert t.turns[0].observation.messages[0]["content"].strip().startswith("<information>Paris")


def test_retool_plays_by_ids_and_its_reward_reads_what_the_function_set(play):
    words = ["--custom-generate-function-path", f"{RETOOL}:generate", "--custom-rm-path", f"{RETOOL}:reward_func"]
    episodes, _ = play(CODE, *words, "--reward-key", "score", "--rollout-max-context-len", "512")
    assert {t.score for t in episodes} == {1.1}
    assert {tuple(sorted(t.rewards)) for t in episodes} == {("reward.acc", "reward.score")}
    assert {t.weights["reward.acc"] for t in episodes} == {0.0}


def test_a_group_reward_gets_the_samples_of_a_group(play):
    words = ["--custom-generate-function-path", f"{RETOOL}:generate", "--custom-rm-path", f"{RETOOL}:group_reward"]
    script = lambda request: "Answer: 42" if request.session.startswith(("0", "2")) else "Answer: 42 or more"  # noqa: E731
    episodes, _ = play(script, *words, "--group-rm", "--rollout-max-context-len", "512")
    assert [t.score for t in episodes] == [1.0, 0.0, 1.0, 0.0]


def test_a_reward_of_slime_scores_the_episodes_of_an_environment(play):
    episodes, _ = play(
        ["Answer: Paris <answer>Paris</answer>"],
        "--custom-rm-path",
        f"{SEARCH}:reward_func",
        "--label-key",
        "reward_model",
    )
    assert {t.score for t in episodes} == {1.0}


def test_a_rollout_function_plays_the_groups_itself(here, play):
    decode = Tokenizer.load(here).decode
    words = ["--rollout-function-path", f"{RETOOL}:generate_rollout", "--reward-key", "score"]
    script = lambda request: CODE["<interpreter>" in decode(request.ids)]  # noqa: E731
    episodes, _ = play(script, *words, "--rollout-max-context-len", "512")
    assert [t.index for t in episodes] == [0, 1, 2, 3]
    assert [t.group_index for t in episodes] == [0, 0, 1, 1]
    assert {t.score for t in episodes} == {1.1}
    assert all(provenances(t.segments[0]) == ["PROMPT", "SAMPLED", "OBSERVATION", "SAMPLED"] for t in episodes)


HEADER = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample, sampling_params):
    tokenizer = GenerateState(args).tokenizer
    prompt = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"text": sample.prompt, "sampling_params": sampling_params})
    ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
    sample.status = Sample.Status.COMPLETED
    sample.response, sample.tokens, sample.response_length, sample.loss_mask = output["text"], prompt + ids, len(ids), None
"""
WRONG = {
    "    sample.tokens = prompt + ids[::-1]\n    return sample": "has loss_mask 1, but the engine did not sample it",
    "    sample.tokens = prompt + ids + ids[:1]\n    sample.response_length += 1\n    return sample": "has loss_mask 1, but",
    "    sample.loss_mask = [1]\n    return sample": "Sample.loss_mask has 1 entries",
    "    return None": "must return a Sample or a list of them, found NoneType",
    "    sample.status = Sample.Status.PENDING\n    return sample": "a sample of status pending",
    "    return [sample, sample]": "which another of its samples trains too",
    "    await post(url, {'text': 'x', 'sampling_params': {'temperature': 0.5}})": "has temperature 0.5, the run samples with 1.0",
    "    await post(url, {'prompt': 'x'})": "the payload needs 'text' or 'input_ids'",
}


@pytest.mark.parametrize("end", WRONG)
def test_what_a_function_must_not_do_ends_the_run_with_one_sentence(here, play, capsys, end):
    Path("wrong.py").write_text(HEADER + end)
    play(["yes"], "--custom-generate-function-path", "wrong.py:generate", status=2)
    assert WRONG[end] in capsys.readouterr().err


def test_tokens_that_the_function_masks_and_those_past_a_cut_are_not_trained(here, play):
    Path("cut.py").write_text(
        HEADER
        + "    sample.tokens, sample.response_length = prompt + ids[:3], 3\n    sample.loss_mask = [1, 0, 1]\n    return sample"
    )
    episodes, _ = play(["one two three four"], "--custom-generate-function-path", "cut.py:generate")
    for t in episodes:
        assert provenances(t.segments[0]) == ["PROMPT", "SAMPLED", "OBSERVATION", "SAMPLED"]
        assert to_samples(t)[0].loss_mask == [1, 0, 1]


def test_what_a_function_raises_is_a_counted_failure(here, play):
    Path("raises.py").write_text(HEADER + "    raise KeyError('x')")
    episodes, _ = play(["yes"], "--custom-generate-function-path", "raises.py:generate", "--max-failure-share", "1")
    assert {t.stop_reason for t in episodes} == {StopReason.ENV_FAILURE}
    assert {t.cause for t in episodes} == {"custom generate function: KeyError"}


@pytest.mark.parametrize("path", ["generate_with_search.generate", "generate_with_search:generate"])
def test_functions_are_named_as_in_slime(monkeypatch, path):
    from agentrl.slime_hooks.modules import load_function

    monkeypatch.chdir(HERE)
    assert load_function("custom-generate-function-path", path).__name__ == "generate"
    with pytest.raises(ConfigError, match="has no 'generat'"):
        load_function("custom-generate-function-path", path[:-1])


def test_the_reward_key_must_be_one_of_the_components(play, capsys):
    words = ["--custom-generate-function-path", f"{RETOOL}:generate", "--custom-rm-path", f"{RETOOL}:reward_func"]
    episodes, _ = play(
        CODE, *words, "--reward-key", "points", "--max-failure-share", "1", "--rollout-max-context-len", "512"
    )
    assert {t.cause for t in episodes} == {"reward reward: no component points"}


CANCEL = '<tool_call>\n{"name": "cancel_order", "arguments": {"order": "71"}}\n</tool_call>'
RETAIL = ["--prompt-data", "retail.jsonl", "--input-key", "index", "--rollout-max-context-len", "2048"]


@pytest.fixture
def retail(here):
    """Tasks whose prompt is an index, as tau-bench's."""
    Path("retail.jsonl").write_text("".join(json.dumps({"index": i}) + "\n" for i in range(2)))


def test_tau_bench_serves_a_simulated_user_with_tools(retail, play):
    script = lambda request: CANCEL if request.turn == 0 else "It is done."  # noqa: E731
    episodes, engine = play(script, *RETAIL, "--custom-generate-function-path", f"{TAU}:generate")
    assert {(t.task.prompt, t.score) for t in episodes} == {("0", 1.0), ("1", 1.0)}
    assert exactness_violations(episodes) == 0
    for t in episodes:
        assert t.stop_reason is StopReason.TERMINATED
        assert provenances(t.segments[0]) == ["PROMPT", "SAMPLED", "OBSERVATION", "SAMPLED", "OBSERVATION"]
        text = engine.renderer.tokenizer.decode(t.segments[0].ids)
        assert f"My order {'71' if t.task.prompt == '0' else '82'} should be" in text
        assert t.state["unused_generations"] == 0


def test_tau_benchs_tokens_of_text_are_refused_with_what_differs(retail, play, capsys):
    play(["It is done."], *RETAIL, "--custom-generate-function-path", f"{TAU}:generate_by_text", status=2)
    error = capsys.readouterr().err
    assert "has loss_mask 1, but the engine did not sample it after the tokens before it" in error
    assert "take the ids of meta_info.output_token_logprobs, never those of the text" in error


def test_a_number_is_a_prompt_of_functions_only(retail, here, capsys):
    assert main(["rollout", "--model", str(here), *RETAIL, "--reward", "em"]) == 2
    assert "'index' must be a string or a list of messages, found int: 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        ([], "capital of france?"),
        (["--apply-chat-template", "false"], "capital of france?"),
        (["--apply-chat-template"], "<|im_start|>user\ncapital of france?<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_prompt_of_text_is_rendered_where_that_is_asked_for(here, play, words, prompt):
    Path("tasks.jsonl").write_text(json.dumps({"prompt": "capital of france?", "label": "42"}) + "\n")
    Path("seen.py").write_text(
        HEADER + "    sample.metadata = {'prompt': sample.prompt}\n    sample.reward = 0.0\n    return sample"
    )
    episodes, _ = play(["yes"], *words, "--custom-generate-function-path", "seen.py:generate")
    for t in episodes:
        assert t.state["slime"]["metadata"]["prompt"].endswith(prompt)
        assert ("<|im_start|>" in t.state["slime"]["metadata"]["prompt"]) == ("<|im_start|>" in prompt)
