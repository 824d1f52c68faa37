"""The environment of the recorded run: two turns and a score that follows from what was written, so a random model has varied scores."""

from agentrl import Action, Env, StepResult, Task, Trajectory, reward, tool


@reward
def letters(trajectory: Trajectory) -> float:
    text = "".join(turn.action.text for turn in trajectory.turns)
    return len(set(text.lower())) / 16


class Letters(Env):
    rewards = [letters]
    shows_tools = True

    def reset(self, task: Task, *, seed: int) -> str:
        self.turns, self.seed = 0, seed
        return f"{task.prompt} (seed {seed % 1000})"

    @tool
    def count(self, text: str) -> int:
        """Count letters."""
        return len(text)

    def step(self, action: Action) -> StepResult:
        self.turns += 1
        return StepResult(f"You wrote {len(action.text)} characters. Go on.", terminated=self.turns == 2, reward=0.25)

    def state(self):
        return {"turns": self.turns}

    @classmethod
    def tasks(cls, split: str):
        return [Task(f"{split}-{n}", f"Write about {n}.", n) for n in range(4)]
