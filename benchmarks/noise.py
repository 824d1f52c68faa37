"""A reward without information: the ablation of the search_r1 example. A rise of EM under it is leakage or chance, not learning."""

from random import Random

from agentrl import Trajectory, reward


@reward
def noise(trajectory: Trajectory) -> float:
    """1.0 with probability 0.4, else 0.0, drawn by the episode's seed."""
    return float(Random(trajectory.seed).random() < 0.4)
