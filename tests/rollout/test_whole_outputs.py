"""Full outputs of tools: saved once with the record if enabled, shown by the page, compared by a replay."""

import hashlib
import json
import shutil

import numpy as np
from doubles import FakeEngine, call, groups_of, make_runner
from safetensors.numpy import save_file

from agentrl import ToolEnv, tool
from agentrl.cli.main import main
from agentrl.replay.playback import EveryTool
from agentrl.replay.replayer import replay_group
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.store import EpisodeWriter, Recording, read_episodes
from agentrl.view.episode_detail import MAX_OUTPUT_CHARS, episode_detail
from agentrl.view.html_export import html_of

LONG = "Größe <b>" + "x" * 600 + " and the end"
SCRIPT = [call("page"), call("fail"), "done"]


class Pages(ToolEnv):
    action_format = "hermes"
    text = LONG

    @tool(max_result_bytes=100)
    def page(self) -> str:
        """Read."""
        return self.text

    @tool(max_result_bytes=50)
    def fail(self) -> str:
        """Fail."""
        raise ValueError("no " * 50)


async def record(hermes, folder, keep=True):
    writer = EpisodeWriter(folder)
    runner = make_runner(Pages, SCRIPT, hermes)
    runner.pools.tool_executor.save_output = writer.outputs.write if keep else None
    groups, _ = await Rollout(runner, RolloutLimits()).run(groups_of(2, 2))
    runner.close()
    for g in groups:
        for t in g.trajectories:
            writer.write(t, split="train")
    writer.close()
    return list(read_episodes(folder))


async def test_the_full_text_of_a_truncated_output_is_saved_with_the_record(hermes, tmp_path):
    (t, *_) = await record(hermes, tmp_path)
    outputs = Recording(tmp_path).outputs
    assert len(list(outputs.folder.iterdir())) == 2  # of four episodes: each output once
    result = t.turns[0].action.results[0]
    assert result.sha256 == hashlib.sha256(LONG.encode()).hexdigest()
    assert result.content.startswith(LONG[:80])
    assert outputs.read(result.sha256) == LONG
    assert outputs.read(t.turns[1].action.results[0].sha256).startswith("error: ValueError: no no")
    assert outputs.read("0" * 64) is None
    assert outputs.read("../../etc/passwd") is None


async def test_outputs_are_saved_only_if_enabled(hermes, tmp_path):
    await record(hermes, tmp_path, keep=False)
    assert not (tmp_path / "outputs").exists()


async def test_the_page_shows_it(hermes, tmp_path):
    await record(hermes, tmp_path)
    recording = Recording(tmp_path)
    entry = recording.record(recording.entry("0-0"))
    detail = episode_detail(entry, None, None, None, recording.images, recording.outputs)
    assert LONG in detail["outputs"].values()
    assert all(len(text) <= MAX_OUTPUT_CHARS for text in detail["outputs"].values())
    assert "and the end" in html_of(detail)
    assert "<b>" not in html_of(detail)


async def test_a_replay_reports_the_first_difference_in_the_full_output(hermes, tmp_path):
    members = (await record(hermes, tmp_path))[:2]

    class Changed(Pages):
        text = LONG.replace("end", "END")

    Changed.name = "Pages"
    runner = make_runner(Changed, [], hermes)
    outcomes = await replay_group(runner, members, EveryTool(), Recording(tmp_path).outputs)
    for d in (o.divergence for o in outcomes):
        assert (d.cause, d.turn, d.what) == ("tool result", 0, "the whole output of result 0 (page)")
        assert d.then.endswith("and the end")
        assert d.today.endswith("and the END")
    (outcome, _) = await replay_group(runner, members, EveryTool())
    assert outcome.divergence.what == "sha256 of result 0 (page)"
    outcomes = await replay_group(make_runner(Pages, [], hermes), members, None, Recording(tmp_path).outputs)
    assert [o.divergence for o in outcomes] == [None, None]
    runner.close()


def test_the_flags_from_rollout_to_replay(tokenizer_dir, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(tokenizer_dir, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    save_file({"x": np.ones(1, np.float32)}, folder / "model.safetensors")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "read", "label": ""}) + "\n")
    monkeypatch.setattr("agentrl.run.components.Components.engine", lambda self, *_: FakeEngine(self.renderer, SCRIPT))
    flags = {
        "env": f"{__file__}:Pages",
        "prompt-data": data,
        "hf-checkpoint": folder,
        "run": tmp_path / "run",
        "num-rollout": 1,
    }
    flags |= {
        "rollout-batch-size": 1,
        "n-samples-per-prompt": 2,
        "global-batch-size": 2,
        "eval-interval": 0,
        "tensorboard": "false",
    }
    flags |= {"keep-whole-outputs": "true", "context-policy": f"{__file__}:forgetful"}
    assert main(["rollout", *(str(w) for k, v in flags.items() for w in (f"--{k}", v))]) == 0
    recording = Recording(tmp_path / "run")
    assert len(recording.episodes) == 2
    assert len(list(recording.outputs.folder.iterdir())) == 2
    t = next(read_episodes(tmp_path / "run"))
    assert [u.info.get("new_segment") for u in t.turns] == ["the context policy", "the context policy", None]
    replay = ["replay", str(tmp_path / "run"), "--workers", "1", "--live-tools"]
    assert main(replay) == 0
    assert main([*replay, "page"]) == 0
    assert main([*replay, "page", "pages"]) == 2
    refused = "--live-tools pages: none of the episodes calls a tool of this name; did you mean 'page'?"
    assert refused in capsys.readouterr().err


def forgetful(view):
    """Nothing but the first prompt and the newest observation."""
    return [*view.messages[: view.first], {"role": "user", "content": view.messages[-1]["content"]}]
