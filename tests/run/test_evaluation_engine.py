"""`--eval-engine`: evaluations keep the version with which they began, while rollouts, training and weight updates go on."""

import pytest
import test_async_training
from test_async_training import Engine, play, trained  # noqa: F401  play is a fixture

from agentrl.config import build_config
from agentrl.errors import ConfigError
from agentrl.run import components as assemble
from agentrl.store import read_records

SYNC = {"schedule": "sync", "async_buffer_size": None, "consumption_window": None, "use_tis": False}


@pytest.mark.parametrize("settings", [{}, SYNC], ids=["async", "sync"])
def test_an_evaluation_keeps_its_version_while_the_rollouts_get_new_weights(play, monkeypatch, settings):  # noqa: F811
    engines, versions = [], []

    class Slow(Engine):
        """Takes so long that several rollouts are trained on meanwhile."""

        async def generate(self, *arguments, **options):
            generation = await super().generate(*arguments, **options)
            versions.append((generation.policy_version, engines[0].policy_version))
            return generation

    def local_engine(components, folder):
        slow = Slow(components)
        slow._delay_s = 20.0
        return slow

    class Noted(Engine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            engines.append(self)

    monkeypatch.setattr(test_async_training, "Engine", Noted)
    monkeypatch.setattr(assemble.Components, "_local_engine", local_engine)
    folder, *_ = play(eval_interval=2, save_interval=6, eval_engine=["separate"], **settings)
    records = [r for r in read_records(folder / "episodes") if r["split"].startswith("eval/")]
    found = {r["step"]: set() for r in records}
    for r in records:
        found[r["step"]] |= {
            s["policy_version"] for seg in r["segments"] for s in seg["spans"] if "policy_version" in s
        }
    assert found == {0: {0}, 2: {2}, 4: {4}, 6: {6}}
    assert any(newer > own for own, newer in versions), "training went on during an evaluation"
    assert not [r for r in engines[0].requests if r.session.startswith("eval/")]
    assert sorted(r["index"] for r in trained(folder)) == list(range(36))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_engine": ["localhost:1"]}, "can only be separate; found localhost:1"),
        ({"eval_engine": ["localhost:1"], "engine": "sglang", "runner_processes": 2}, "leave out --runner-processes"),
    ],
)
def test_what_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_config(settings)
