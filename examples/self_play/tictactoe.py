"""TicTacToe in self-play: the policy plays both sides, each side is trained by its own result.

python examples/warm_up.py examples/self_play runs/warm
agentrl train --config examples/self_play/config.toml --model runs/warm/hf
"""

from random import Random

from agentrl import Env, StepResult, Task, reward
from agentrl.types import Observation

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


@reward(weight=0)
def won(trajectory):
    """Whether the side won."""
    return float(trajectory.state.get("winner") == trajectory.role)


class TicTacToe(Env):
    """Two sides mark cells of a board in turns. A win scores 1, a loss −1, a draw 0, a cell that is taken −1.

    Args:
        opening: marks that are set at random before the game, the same in all games of a group.
    """

    roles = ("X", "O")
    rewards = (won,)
    action_format = "hermes"
    eval_score = "won.X"

    def __init__(self, opening: int = 2) -> None:
        self.opening = opening
        self.winner = ""

    @classmethod
    def tasks(cls, split):
        return [Task(f"{split}{i}", "TicTacToe") for i in range(1000 if split == "train" else 200)]

    def reset(self, task, *, seed, group_seed):
        self.cells = [str(i + 1) for i in range(9)]
        for side, cell in zip("XO" * 5, Random(group_seed).sample(range(9), self.opening), strict=False):
            self.cells[cell] = side
        self.turn = self.opening
        return self.show()

    def show(self):
        """What the side to move reads."""
        self.side = "XO"[self.turn % 2]
        return Observation.of(f"{self.side}: {'|'.join(self.cells)}", to=self.side)

    def step(self, action):
        move, other = action.text.strip(), "XO"[(self.turn + 1) % 2]
        if move not in self.cells or move in "XO":
            return StepResult(rewards={self.side: -1.0}, terminated=True, info={"taken": True})
        self.cells[int(move) - 1] = self.side
        if any(all(self.cells[i] == self.side for i in line) for line in LINES):
            self.winner = self.side
            return StepResult(rewards={self.side: 1.0, other: -1.0}, terminated=True)
        self.turn += 1
        return StepResult(self.show(), terminated=self.turn == 9)

    def state(self):
        return {"winner": self.winner}
