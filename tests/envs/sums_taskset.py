"""A taskset of verifiers, written as its documentation shows."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsConfig(vf.TasksetConfig):
    digits: int = 1


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for n in range(10**self.config.digits):
            yield SumsTask(SumsData(prompt=f"{n}+{n}=?", answer=str(2 * n), system_prompt="Answer."), self.config.task)
