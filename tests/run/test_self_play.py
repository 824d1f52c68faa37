"""Self-play in whole runs, synchronous and asynchronous: whose tokens are trained, by which version, and what a resumed run continues.

The runs are those of test_async_training.py, on its virtual clock.
"""

import pytest
from test_async_training import Trainer, play, trained

from agentrl import Env, StepResult, Task
from agentrl.run.train_only import train_only
from agentrl.types import Observation, split_role_id

__all__ = ["play"]
SYNC = {"schedule": "sync", "async_buffer_size": None, "consumption_window": None}
SCHEDULES = pytest.mark.parametrize("schedule", [{}, SYNC], ids=["async", "sync"])


async def answer(messages, *, seed):
    return f"{seed % 100}"


class Duel(Env):
    """White and black say two numbers each in turns; the difference of their sums is won.

    Nothing runs in a thread, which the virtual clock would not wait for.
    """

    roles = ("white", "black")
    action_format = "search_r1"

    @classmethod
    def tasks(cls, split):
        return [Task(f"{split}{i}", "Begin.") for i in range(20)]

    async def reset(self, task, *, seed):
        self.said = []
        return "You are white. Say a number."

    async def step(self, action):
        self.said.append(int("".join(c for c in action.text if c.isdigit()) or 0))
        if len(self.said) == 4:
            ahead = float(sum(self.said[::2]) - sum(self.said[1::2]))
            return StepResult(rewards={"white": ahead, "black": -ahead}, terminated=True, info={"said": self.said})
        return StepResult(Observation.of(f"The other said {self.said[-1]}.", to=self.roles[len(self.said) % 2]))

    async def state(self):
        return {}


class Recorder(Trainer):
    """Keeps what is trained, by episode and role."""

    def __init__(self, crash_after=None):
        super().__init__(crash_after)
        self.trained = {}

    def step(self, rows, loss, lr):
        metrics = super().step(rows, loss, lr)
        for row in rows:
            self.trained[row.source[0]] = row.tokens[row.weights > 0].tolist()
        return metrics


@pytest.fixture
def duels(play):
    """A run in which the policy says a number that its seed decides."""

    def number(request):
        return str(request.sampling.seed % 100)

    def run(name="run", **settings):
        return play(name, engine={"says": number}, env=f"{__file__}:Duel", action_format="search_r1", **settings)

    return run


def tokens(record, role, provenance):
    """The ids of a role's segments."""
    segments = [s for s in record["segments"] if s["agent_id"] == role]
    return [i for s in segments for span in s["spans"] if span["provenance"] == provenance for i in span["ids"]]


@SCHEDULES
def test_both_sides_are_trained_each_on_its_own_tokens(duels, schedule):
    trainer = Recorder()
    folder, *_ = duels(trainer=trainer, **schedule)
    records = trained(folder)
    assert sorted(r["index"] for r in records) == list(range(36))
    assert {role for name in trainer.trained for role in split_role_id(name)[1:]} == {"white", "black"}
    by_id = {r["episode_id"]: r for r in records}
    for name, ids in trainer.trained.items():
        episode, role = split_role_id(name)
        assert ids == tokens(by_id[episode], role, "SAMPLED") != []
    if not schedule:
        assert max(r["schedule"]["staleness"] for r in records) == 2


@SCHEDULES
def test_a_side_that_another_plays_is_never_trained(duels, schedule):
    trainer = Recorder()
    folder, *_ = duels(trainer=trainer, players={"black": f"{__file__}:answer"}, **schedule)
    assert {split_role_id(name)[1] for name in trainer.trained} == {"white"}
    assert len(trainer.trained) == len(trained(folder)) == 36
    assert all(not tokens(r, "black", "SAMPLED") for r in trained(folder))


@pytest.mark.slow
def test_train_only_on_the_record_of_asynchronous_self_play_gives_the_same_weights(duels, play):
    folder, trainer, *_ = duels(trainer=Recorder())
    again = Recorder()
    job = lambda config, echo: train_only(config, folder, echo=echo)  # noqa: E731
    duels("again", trainer=again, job=job)
    assert again.trained == trainer.trained
    assert again.weights == trainer.weights != 0


@pytest.mark.slow
def test_resumed_self_play_is_the_run_that_was_not_interrupted(duels):
    whole, trainer, *_ = duels("whole", trainer=Recorder(), **SYNC)
    with pytest.raises(KeyboardInterrupt):
        duels(trainer=Recorder(crash_after=4), **SYNC)
    folder, resumed, *_ = duels(trainer=Recorder(), resume=True, **SYNC)
    assert resumed.weights == trainer.weights != 0
    played = [{r["episode_id"]: (r["step"], r["turns"][-1]["info"]) for r in trained(f)} for f in (whole, folder)]
    assert played[0] == played[1]
    assert len(played[0]) == 36


@pytest.mark.slow
def test_resumed_asynchronous_self_play_trains_each_side_of_each_episode_once(duels):
    crashing = Recorder(crash_after=4)
    with pytest.raises(KeyboardInterrupt):
        duels(trainer=crashing)
    folder, resumed, *_ = duels(trainer=Recorder(), resume=True)
    sides = [name for step in crashing.fed[:3] + resumed.fed for name, _ in step]
    assert sorted(sides) == sorted(f"{r['episode_id']}#{role}" for r in trained(folder) for role in ("white", "black"))
