"""Compare supervised turns and calls with what the models' own templates write: `python benchmarks/sft_equality.py [--write]`.

First table: random conversations of every model family and of every chat template of the `trl` package, with thinking on and off. The ids that
`agentrl sft` trains on must be those that transformers' rendering of the template has in that turn after its generation header. A row may be
refused only if the template cannot express it.

Second table: random calls by random JSON schemas, written by the families' templates and as policies write them, must be read as they were.
Exit status 1 if a turn differs, a row is refused without cause, or more than 1 % of a format's calls are ambiguous.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "render"))

from conversations import NOW
from result_record import commit
from template_models import MODELS, data_file, renderer, template_source
from template_turns import Outcome, Subject, compare, modes
from test_all_templates import REFUSED, tokenizer_of
from test_call_round_trips import BY_HAND, BY_TEMPLATE, json_writer, misread_calls, written_by_template

from agentrl.render import make_renderer

RESULTS = Path(__file__).with_name("results")
MOST_AMBIGUOUS = 0.01


def subjects() -> Iterator[Subject]:
    """Every family and every template of trl that can be rendered, in each of its thinking modes."""
    for model in MODELS:
        for options in modes(template_source(model)):
            yield Subject(model.name, renderer(model.name, now=NOW, **options), options)
    for path in sorted(data_file("trl", "chat_templates", "").glob("*.jinja")):
        if path.stem.endswith("_training") or path.stem in REFUSED:
            continue
        source = path.read_text(encoding="utf-8")
        for options in modes(source):
            ours = make_renderer(tokenizer_of(source), where=path.stem, now=NOW, **options)
            yield Subject(f"trl {path.stem}", ours, options)


def turns_table(families: int, trl: int) -> tuple[list[str], list[str], bool]:
    """(the rows of the table, the reasons and differences, whether all is well)."""
    rows = [
        "| template | thinking | conversations | equal | refused | refused without cause | different turns |",
        "|---|---|---|---|---|---|---|",
    ]
    notes, good = [], True
    for subject in subjects():
        thinking = {True: "on", False: "off"}.get(subject.options.get("enable_thinking", ""), "")
        count = trl if subject.name.startswith("trl ") else families
        outcome: Outcome = compare(subject, range(count))
        refused, wrongly = sum(outcome.refused.values()), len(outcome.refused_wrongly)
        rows.append(
            f"| {subject.name} | {thinking} | {count} | {outcome.equal} | {refused} | {wrongly} | {len(outcome.different)} |"
        )
        notes += [f"- {subject.name} {thinking}: {n} refused: {reason}" for reason, n in outcome.refused.most_common()]
        notes += [f"- {subject.name} {thinking}: {line}" for line in (*outcome.refused_wrongly, *outcome.different)[:5]]
        good &= not wrongly and not outcome.different
        print(rows[-1], flush=True)
    return rows, notes, good


def calls_table(count: int) -> tuple[list[str], list[str], bool]:
    """The same for calls."""
    rows = ["| format | calls written by | calls | ambiguous or errors |", "|---|---|---|---|"]
    notes, good = [], True
    writers: list[tuple[str, str, Callable[..., str]]] = [
        *((renderer(name).format.name, f"template of {name}", written_by_template(name)) for name in BY_TEMPLATE),
        *((name, "a policy", json_writer(name)) for name in BY_HAND),
    ]
    for name, who, write in writers:
        misread = misread_calls(name, write, count)
        rows.append(f"| {name} | {who} | {count} | {len(misread)} |")
        notes += [f"- {name}, {who}: {text!r} is read as {read!r}" for text, read in misread[:3]]
        good &= len(misread) <= MOST_AMBIGUOUS * count
        print(rows[-1], flush=True)
    return rows, notes, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-n", type=int, default=2000, help="conversations of each family and mode, and calls of each format"
    )
    parser.add_argument("--trl", type=int, default=1000, help="conversations of each template of trl and mode")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/sft_equality.md")
    args = parser.parse_args()
    started = time.process_time()
    turns, turn_notes, turns_good = turns_table(args.n, args.trl)
    calls, call_notes, calls_good = calls_table(args.n)
    seconds = time.process_time() - started
    if args.write:
        when = datetime.now(UTC).date().isoformat()
        head = (
            f"{args.n} random conversations of each family and mode, {args.trl} of each template of trl, {args.n} random calls of each format; "
            f"`python benchmarks/sft_equality.py -n {args.n} --trl {args.trl} --write`, commit {commit()}, {when}, {seconds:.0f} s of one core "
            "beside other load."
        )
        parts = [
            "# Supervised turns and calls beside the models' own templates",
            head,
            "\n".join(turns),
            "\n".join(turn_notes),
        ]
        parts += ["## Calls", "\n".join(calls), "\n".join(call_notes)]
        (RESULTS / "sft_equality.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    return 0 if turns_good and calls_good else 1


if __name__ == "__main__":
    sys.exit(main())
