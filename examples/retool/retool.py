"""ReTool: a policy that computes with Python before it answers (Feng et al. 2025, arXiv 2504.11536).

The policy writes `<code>…</code>`, reads what the code prints in `<interpreter>…</interpreter>`, and ends with `<answer>…</answer>`. Code runs in
a sandbox of the episode's own, whose variables stay from turn to turn. The reward is the paper's: 1 for an answer that equals the label, else -1.

    agentrl check --env examples/retool/retool.py
    agentrl train --env examples/retool/retool.py --hf-checkpoint MODEL

With the embedded policy, which must be taught the tags first (see README.md):

    python examples/warm_up.py examples/retool runs/warm --episodes 1200
    agentrl train --config examples/retool/config.toml --model runs/warm/hf
"""

from fractions import Fraction
from random import Random

from agentrl import Task, ToolEnv, reward
from agentrl.render.formats.inline_tags import TagFormat
from agentrl.sandbox import SandboxLimits
from agentrl.tools.sandbox import Python

TASKS = 512
INSTRUCTIONS = (
    "Write Python between <code> and </code>; you then read what it prints. "
    "Give the answer, a number, between <answer> and </answer>. "
)


def number(text):
    """An answer as a fraction; None if it is not a number."""
    try:
        return Fraction(str(text).replace(",", "").strip())
    except (ValueError, ZeroDivisionError):
        return None


@reward
def correct(trajectory):
    """1 if the answer is the label as a number, or word for word; else -1."""
    answer, label = trajectory.answer or "", str(trajectory.label)
    equal = answer.strip() == label or (number(answer) is not None and number(answer) == number(label))
    return 1.0 if equal else -1.0


class Retool(ToolEnv):
    """Exercises that are hard in the head and easy in Python. `--prompt-data` brings others.

    Args:
        time_s: limit of each call.
        sandbox: the backend, see `agentrl.sandbox.choose_backend`.
        instructions: describe the tags in the prompt, for models that do not know them.
    """

    action_format = TagFormat("retool", calls={"code": ("python", "code")}, result_tag="interpreter")
    rewards = (correct,)
    shows_tools = True
    eval_score = "correct"

    def __init__(self, time_s: float = 5.0, sandbox: str = "auto", instructions: bool = True):
        limits = SandboxLimits(time_s=time_s, memory_bytes=256 << 20)
        self.python = Python(limits, sandbox)
        self.tools = [self.python]

    @classmethod
    def tasks(cls, split, instructions=True):
        """Sums modulo a prime; other numbers in each split."""
        random = Random(f"retool {split}")
        for index in range(TASKS):
            base, exponent, modulus = random.randint(2, 99), random.randint(2, 50), random.choice([97, 101, 103, 107])
            question = f"What is {base}**{exponent} modulo {modulus}?"
            yield Task(
                f"{split}-{index}",
                INSTRUCTIONS + question if instructions else question,
                str(pow(base, exponent, modulus)),
            )

    def state(self):
        """What the sandbox closes off, for the record."""
        return {"sandbox": self.python.sandbox.backend.note}
