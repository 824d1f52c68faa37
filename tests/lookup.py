"""An environment as a user writes one: two searches, then an answer. Its file is also what tests of the commands give to `--env`."""

from agentrl import ToolEnv, reward, tool


@reward
def exact(trajectory):
    return float(trajectory.answer == trajectory.label)


@reward
def short(trajectory):
    return -float(len(trajectory.answer or ""))


class Search(ToolEnv):
    """Two searches, then an answer."""

    action_format = "search_r1"
    rewards = (exact,)

    @tool
    def search(self, query: str) -> str:
        """Look something up."""
        return f"{query} is in Europe"

    def state(self):
        return {"open": False}
