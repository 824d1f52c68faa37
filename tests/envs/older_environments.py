"""Environments of verifiers before 0.4, as its documentation shows them, with what the real one of the tests lacks: tools and several turns."""

import asyncio

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(8)]


def right(completion, answer) -> float:
    return float(answer in (completion[-1].content or ""))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    if a > 90:
        raise ValueError("too large")
    return a + b


class Guess(vf.MultiTurnEnv):
    """The policy guesses the answer. `stop`: a guess that fails the environment. `wait`: a guess that takes longer than its time limit."""

    def __init__(self, rewrites: bool, **kwargs):
        super().__init__(**kwargs)
        self.rewrites = rewrites

    async def setup_state(self, state):
        state["guesses"] = 0
        return state

    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and state["answer"] in state["trajectory"][-1]["completion"][-1].content

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        state["guesses"] += 1
        if "stop" in said:
            raise vf.InfraError("the sandbox died")
        if "wait" in said:
            await asyncio.sleep(60)
        return [{"role": "user", "content": f"{said} is wrong, guess {state['guesses']}."}]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if self.rewrites and state["trajectory"] else messages


def broken(completion) -> float:
    raise ValueError("no such column")


def of_a_group(completions) -> list[float]:
    return [0.0 for _ in completions]


def load_environment(kind: str = "guess", reward: str = "right", seconds: float | None = None, test_rows: int = 0):
    rewards = {"right": right, "broken": broken, "of_a_group": of_a_group}
    rubric = vf.Rubric(funcs=[rewards[reward]]) if reward != "none" else vf.Rubric()
    data = {"dataset": Dataset.from_list(ROWS), "rubric": rubric, "system_prompt": "Be brief."}
    if test_rows:
        data["eval_dataset"] = Dataset.from_list(ROWS[:test_rows])
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=3, **data)
    return Guess(rewrites=kind == "rewrites", max_turns=3, timeout_seconds=seconds, **data)
