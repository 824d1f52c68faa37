"""Compare two runs bit by bit: `python benchmarks/compare_runs.py RUN OTHER`. OTHER may be a file that `--write FILE` made of an earlier run.

It compares metrics.jsonl (which has no timings), every episode record without its timings, and the exported weights.
Exit status 0: equal; 1: different, and the first difference is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import orjson

from agentrl.store import read_records


def episodes(run: Path) -> str:
    """SHA-256 of all episode records, without what depends on the clock or on paths."""
    digest = hashlib.sha256()
    for record in read_records(run / "episodes"):
        record.pop("timings")
        record.pop("config", None)  # a fingerprint of settings that include absolute paths
        for turn in record["turns"]:
            turn.pop("timings")
            for result in turn["action"]["results"]:
                result.pop("duration_s")
        digest.update(orjson.dumps(record))
    return digest.hexdigest()


def fingerprint(run: Path) -> dict[str, Any]:
    """What is compared of a run folder."""
    return {
        "metrics": [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()],
        "episodes": episodes(run),
        "weights": {
            f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted((run / "hf").glob("*.safetensors"))
        },
    }


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """One sentence for each part that differs."""
    found = []
    for number, (a, b) in enumerate(zip(mine["metrics"], theirs["metrics"], strict=False)):
        if a != b:
            keys = [k for k in a.keys() | b.keys() if a.get(k) != b.get(k)]
            found.append(f"metrics line {number + 1} differs in {sorted(keys)}: {a} against {b}")
            break
    if len(mine["metrics"]) != len(theirs["metrics"]):
        found.append(f"{len(mine['metrics'])} lines of metrics against {len(theirs['metrics'])}")
    return found + [f"{part} differ" for part in ("episodes", "weights") if mine[part] != theirs[part]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("other", type=Path, nargs="?", help="another, or a file written by --write")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write what is compared of RUN to FILE (JSON)")
    args = parser.parse_args()
    mine = fingerprint(args.run)
    if args.write:
        args.write.write_bytes(orjson.dumps(mine, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if args.other is None:
        return 0
    theirs = orjson.loads(args.other.read_bytes()) if args.other.is_file() else fingerprint(args.other)
    found = differences(mine, theirs)
    print(
        "\n".join(found)
        or f"equal: {len(mine['metrics'])} lines of metrics, all episodes, {len(mine['weights'])} files of weights"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
