"""Whether stepping Gymnasium's environments as one vector pays: `python benchmarks/gymnasium_vector.py [--write]`.

It measures the time of a step of one environment among 64, stepped one by one, as `gymnasium.vector` in this process, and as NumPy arrays where the
environment has such a version (CartPole); and of a step by the adapter, with the text that the policy reads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import gymnasium
from result_record import result_record

from agentrl.env import make_env_class, tasks_of

RESULTS = Path(__file__).parent / "results" / "gymnasium_cpu.json"
COUNT = 64
TARGETS = {"FrozenLake-v1": "sync", "CartPole-v1": "vector_entry_point"}


def microseconds(call: Callable[[], None], repeats: int) -> float:
    """Median time of a call for each of the environments."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e6 * median(times) / COUNT


def measure(target: str, mode: str, repeats: int) -> dict[str, float]:
    """Microseconds of a step of one environment, by how it is stepped."""
    single = [gymnasium.make(target) for _ in range(COUNT)]
    vector = gymnasium.make_vec(target, num_envs=COUNT, vectorization_mode=mode)
    actions = vector.action_space.sample()
    vector.reset(seed=0)

    def one_by_one() -> None:
        for env, action in zip(single, actions, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    for seed, env in enumerate(single):
        env.reset(seed=seed)
    env_class = make_env_class(f"gymnasium:{target}")
    task = next(iter(tasks_of(env_class, "train", {})))
    adapted = [env_class() for _ in range(COUNT)]
    for env in adapted:
        env.reset(task, seed=0, group_seed=0)

    def with_text() -> None:
        for env, action in zip(adapted, actions, strict=True):
            outcome = env.act(action)
            if outcome.terminated or outcome.truncated:
                env.reset(task, seed=0, group_seed=0)

    return {
        "one by one": microseconds(one_by_one, repeats),
        f"as a vector ({mode})": microseconds(lambda: vector.step(actions), repeats),
        "one by one with the text, as the adapter does": microseconds(with_text, repeats),
    }


def main() -> None:
    """Print the records, and write them with --write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results/gymnasium_cpu.json")
    args = parser.parse_args()
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    command = f"python benchmarks/gymnasium_vector.py --repeats {args.repeats}"
    rows = [
        result_record(f"microseconds, {target}, {how}", round(value, 2), None, command, machine=load)
        for target, mode in TARGETS.items()
        for how, value in measure(target, mode, args.repeats).items()
    ]
    text = json.dumps(rows, indent=1)
    print(text)
    if args.write:
        RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
