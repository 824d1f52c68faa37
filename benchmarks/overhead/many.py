"""10,000 concurrent episodes of 8 turns in one process: they must complete; reports the memory used, and that nothing is left behind.

python -m benchmarks.overhead.many [--episodes 10000] [--turns 8]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from benchmarks.overhead import agent
from benchmarks.overhead.meter import memory_kb
from benchmarks.overhead.processes import Mock
from benchmarks.overhead.results import keep


def main() -> int:
    """Run and say; status 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="keep in benchmarks/results/overhead_cpu.{json,md}")
    args = parser.parse_args()
    baseline_kb = memory_kb("VmRSS")
    renderer = agent.make_agent_renderer()
    with Mock(args.turns) as mock:
        work = agent.run(mock.address, args.episodes, args.turns, args.episodes, renderer=renderer)
        found: dict[str, Any] = asyncio.run(work)
    found.pop("rounds_ms")
    found["kb_per_episode"] = (found["peak_mb"] * 1024 - baseline_kb) / args.episodes
    print(json.dumps(found))
    if args.write:
        text = (
            f"{found['done']} of {args.episodes} episodes of {args.turns} turns, all at once: {found['wall_s']:.0f} s, "
            f"{found['kb_per_episode']:.1f} kB an episode over the imports, the tokenizer among it, {found['cpu_ms_per_turn']:.2f} CPU ms a turn, "
            f"{found['tasks_left']} tasks left, {found['wrong']} wrong, {found['violations']} exactness violations."
        )
        keep("many at once", "python -m benchmarks.overhead.many --write", found, text)
    good = found["done"] == args.episodes and not (found["tasks_left"] or found["wrong"] or found["violations"])
    return 0 if good and found["kb_per_episode"] < 100 else 1


if __name__ == "__main__":
    sys.exit(main())
