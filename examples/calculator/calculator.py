"""Products of two numbers with a calculator: the policy learns to use the tool instead of guessing.

python examples/warm_up.py examples/calculator runs/warm --episodes 1500
agentrl train --config examples/calculator/config.toml --model runs/warm/hf
"""

from random import Random

from agentrl import Task, ToolEnv, reward, tool
from agentrl.render import TagFormat


@reward
def correct(trajectory):
    return float(trajectory.answer == trajectory.label)


class Calculator(ToolEnv):
    """Answer what a product is."""

    rewards = (correct,)
    eval_score = "correct"
    action_format = TagFormat("calculator", calls={"calc": ("calculator", "expression")}, result_tag="result")

    @classmethod
    def tasks(cls, split):
        random = Random(split)
        pairs = [(random.randint(2, 9), random.randint(11, 99)) for _ in range(2000 if split == "train" else 200)]
        return [Task(f"{split}{i}", f"{a} * {b} = ?", str(a * b)) for i, (a, b) in enumerate(pairs)]

    @tool
    def calculator(self, expression: str) -> str:
        """Multiply two numbers."""
        a, star, b = expression.replace(" ", "").partition("*")
        return str(int(a) * int(b)) if star and a.isdecimal() and b.isdecimal() else "error: write A * B"
