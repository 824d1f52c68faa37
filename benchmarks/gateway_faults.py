"""Black-box episodes at the gateway for an hour, a tenth of whose requests fail on the client's side: nothing is lost, nothing trained twice.

    python benchmarks/gateway_faults.py [--minutes 60] [--concurrent 256] [--processes 1] [--out FILE]

The agents and the check of each record are those of tests/gateway/test_chaos.py: a client leaves while it waits, cuts a stream, repeats a request,
sends garbage, or sends a request after the end of its episode. Agents, gateway and scripted engine share one process. What each client received
and what the engine sampled must be in the record once, with its log-probs; at the end no session may be open. It ends at the first violation.
With `--processes` several such processes play other episodes at the same time, so that many cores play those of an hour in minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
from result_record import result_record

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "gateway")]

from test_chaos import storm  # noqa: E402

from agentrl.render import Tokenizer, make_renderer  # noqa: E402

EPISODES = 1 << 24
"""most of one process"""


def play(job: tuple[int, float, int]) -> Counter[str]:
    """The counts of one process."""
    number, minutes, concurrent = job
    renderer = make_renderer(Tokenizer.load(TESTS.parent / "agentrl/assets/search_r1_3m"), "hermes")
    counts: Counter[str] = asyncio.run(storm(renderer, 60 * minutes, concurrent, number * EPISODES))
    return counts + Counter({"megabytes at the end": psutil.Process().memory_info().rss >> 20})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--concurrent", type=int, default=256, help="episodes at a time in one process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    started = time.monotonic()
    jobs = [(number, args.minutes, args.concurrent) for number in range(args.processes)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        counts: Counter[str] = sum(pool.imap_unordered(play, jobs), Counter())
    seconds = time.monotonic() - started
    for name, count in sorted(counts.items()):
        print(f"{name:60} {count}")
    print("0 lost, 0 trained twice, 0 sessions open")
    if args.out:
        options = " ".join(f"--{name} {vars(args)[name]:g}" for name in ("minutes", "concurrent", "processes"))
        record = result_record(
            "turns lost, trained twice, or left open",
            0,
            0,
            f"python benchmarks/gateway_faults.py {options}",
            seconds=round(seconds),
            **dict(sorted(counts.items())),
        )
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
