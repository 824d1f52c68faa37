"""Environments of several speakers, for the tests: a duel of two roles, and a clerk who serves a customer."""

from agentrl import Env, StepResult, Task, reward
from agentrl.types import Observation


@reward
def length(trajectory):
    """The characters that the role wrote."""
    return float(sum(len(t.action.text) for t in trajectory.turns if t.agent_id == trajectory.role))


@reward(group=True)
def rank(trajectories):
    """The place of each among the same role of the group."""
    order = sorted(t.score for t in trajectories)
    return [float(order.index(t.score)) for t in trajectories]


class Duel(Env):
    """White and black say numbers in turns, `rounds` times; the larger sum wins."""

    roles = ("white", "black")
    action_format = "search_r1"

    def __init__(self, rounds=2):
        self.rounds = rounds

    @classmethod
    def tasks(cls, split):
        return [Task(f"{split}{i}", "Begin.") for i in range(4)]

    def reset(self, task, *, seed):
        self.sums = {"white": 0, "black": 0}
        self.moves = 0
        return "You are white. Say a number."

    def step(self, action):
        role = self.roles[self.moves % 2]
        digits = "".join(c for c in action.text if c.isdigit())
        self.sums[role] += int(digits[:6] or 0)
        self.moves += 1
        if self.moves == 2 * self.rounds:
            ahead = self.sums["white"] - self.sums["black"]
            win = (ahead > 0) - (ahead < 0)
            return StepResult(rewards={"white": win, "black": -win}, terminated=True, info=dict(self.sums))
        other = self.roles[self.moves % 2]
        intro = "You are black. " if self.moves == 1 else ""
        text = f"{intro}The other said {digits or 'nothing'}. Your number?"
        return StepResult(
            Observation.of(text, to=other), reward=0.25, rewards={other: 0.125}, state_key=str(self.moves)
        )

    def state(self):
        return dict(self.sums)


class Silent(Duel):
    """Black is never asked."""

    def step(self, action):
        return StepResult(reward=1.0, terminated=True)


def customer(messages, *, seed):
    """Asks for tea, then says thanks."""
    return "Tea, please." if len(messages) == 2 else f"Thanks for: {messages[-1]['content']}"


class Shop(Env):
    """A customer, who is scripted, speaks first; the clerk is the policy."""

    roles = ("customer", "clerk")
    players = {"customer": customer}
    action_format = "search_r1"

    def reset(self, task, *, seed):
        persona = {"role": "system", "content": "You want tea."}
        return Observation.of([persona, {"role": "user", "content": "You enter the shop."}], to="customer")

    def step(self, action):
        self.said = [*getattr(self, "said", []), action.text.strip()]
        if len(self.said) == 3:
            return StepResult(rewards={"clerk": float("tea" in self.said[1])}, terminated=True)
        return StepResult(Observation.of(self.said[-1], to="clerk" if len(self.said) == 1 else "customer"))

    def state(self):
        return {"said": self.said}
