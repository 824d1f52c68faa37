"""Tasksets of verifiers that cannot be used without a harness: tasks without rewards, as its TextArena taskset has, and one that does not load."""

import verifiers.v1 as vf

__all__ = ["UnscoredTaskset"]


class UnscoredConfig(vf.TasksetConfig):
    loads: bool = True


class UnscoredTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class UnscoredTaskset(vf.Taskset[UnscoredTask, UnscoredConfig]):
    def load(self):
        if not self.config.loads:
            raise RuntimeError("install the program")
        yield UnscoredTask(vf.TaskData(prompt="Play."), self.config.task)
