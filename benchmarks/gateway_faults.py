"""Black-box episodes at the gateway for an hour, a tenth of whose requests fail on the client's side: nothing is lost, nothing trained twice.

    python benchmarks/gateway_faults.py [--minutes 60] [--concurrent 256] [--out FILE]

The agents and the check of each record are those of tests/gateway/test_chaos.py: a client leaves while it waits, cuts a stream, repeats a request,
sends garbage, or sends a request after the end of its episode. Agents, gateway and scripted engine share one process. What each client received
and what the engine sampled must be in the record once, with its log-probs; at the end no session may be open. It ends at the first violation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import psutil
from result_record import result_record

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "gateway")]

from test_chaos import storm  # noqa: E402

from agentrl.render import Tokenizer, make_renderer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    renderer = make_renderer(Tokenizer.load(TESTS.parent / "agentrl/assets/search_r1_3m"), "hermes")
    started = time.monotonic()
    counts = asyncio.run(storm(renderer, 60 * args.minutes, args.concurrent))
    seconds = time.monotonic() - started
    counts["megabytes at the end"] = psutil.Process().memory_info().rss >> 20
    for name, count in sorted(counts.items()):
        print(f"{name:60} {count}")
    print("0 lost, 0 trained twice, 0 sessions open")
    if args.out:
        command = f"python benchmarks/gateway_faults.py --minutes {args.minutes:g} --concurrent {args.concurrent}"
        record = result_record(
            "turns lost, trained twice, or left open",
            0,
            0,
            command,
            seconds=round(seconds),
            **dict(sorted(counts.items())),
        )
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
