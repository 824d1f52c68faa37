"""A client process: receives runs as JSON lines, one each, and returns their measurements.

python -m benchmarks.overhead.worker floor|agent [--uvloop] [--new-documents]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Coroutine
from typing import Any

from benchmarks.overhead.meter import memory_kb


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("floor", "agent"))
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--new-documents", action="store_true")
    parser.add_argument("--windowed", action="store_true", help="play as with --schedule async")
    args = parser.parse_args()
    more: dict[str, Any] = {}
    if args.kind == "floor":
        from benchmarks.overhead.floor import run
    else:
        from benchmarks.overhead import agent

        run = agent.run
        agent.NEW_DOCUMENTS = args.new_documents
        more |= {"renderer": agent.make_agent_renderer(), "windowed": args.windowed}
    imported_mb = memory_kb("VmRSS") / 1024
    print("ready", flush=True)
    for line in sys.stdin:
        work: Coroutine[Any, Any, dict[str, Any]] = run(**json.loads(line), **more)
        if args.uvloop:
            import uvloop

            found = uvloop.run(work)
        else:
            found = asyncio.run(work)
        print(json.dumps({**found, "imported_mb": imported_mb}), flush=True)


if __name__ == "__main__":
    main()
