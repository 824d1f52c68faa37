"""Tasksets of verifiers that cannot be used without a harness: without rewards, with a setup, and one that does not load."""

import verifiers.v1 as vf

__all__ = ["UnscoredTaskset"]


class UnscoredConfig(vf.TasksetConfig):
    loads: bool = True
    sets_up: bool = False


class UnscoredTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class PreparedTask(UnscoredTask):
    async def setup(self, trace, runtime):
        await runtime.write("data.txt", b"1")

    @vf.reward
    async def right(self) -> float:
        return 1.0


class UnscoredTaskset(vf.Taskset[UnscoredTask, UnscoredConfig]):
    def load(self):
        if not self.config.loads:
            raise RuntimeError("install the program")
        yield (PreparedTask if self.config.sets_up else UnscoredTask)(vf.TaskData(prompt="Play."), self.config.task)
