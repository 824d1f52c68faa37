"""Draw texts at random for a language review: `python benchmarks/sample_texts.py [--seed N] [PATH ...]` in a checkout.

It prints three samples of 20, each text with its file and line:

- docstrings of modules, classes, functions, constants and fields;
- error texts: the string arguments of `raise` statements, placeholders as `{name}`;
- help texts: the strings under the fields in config/settings/, and the `help` arguments of the command line.

A text is good if someone of the field understands it at first reading. `--all` prints every text instead of a sample.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from random import Random

ROOTS = ("agentrl", "envs", "tools", "rewards")
SETTINGS = Path("agentrl/config/settings")
KINDS = ("docstring", "error", "help")
Text = tuple[str, Path, int, str]
"""kind, file, line, text"""


def python_files() -> list[Path]:
    """Return the Python files of the package. `agentrl/envs`, `tools` and `rewards` are links to the top-level folders."""
    files = {path.resolve() for root in ROOTS for path in Path(root).rglob("*.py")}
    return sorted(path.relative_to(Path.cwd()) for path in files)


def literal(node: ast.AST) -> str | None:
    """Return a string expression as text, with placeholders for what is computed; None if it is not a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or f"{{{ast.unparse(part).strip('{}')}}}" for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = literal(node.left), literal(node.right)
        return None if left is None and right is None else f"{left or '{…}'}{right or '{…}'}"
    return None


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def errors(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                text = literal(argument)
                if text:
                    yield node.lineno, text


def helps(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help":
            text = literal(node.value)
            if text:
                yield node.value.lineno, text


def texts() -> Iterator[Text]:
    for path in python_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, text in docstrings(tree):
            yield "help" if path.parent == SETTINGS and line > 1 else "docstring", path, line, text
        yield from (("error", path, line, text) for line, text in errors(tree))
        yield from (("help", path, line, text) for line, text in helps(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the draw (default: 0)")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="texts of each kind (default: 20)")
    parser.add_argument("--all", action="store_true", help="print every text")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="only files below these (default: all)")
    args = parser.parse_args()
    population = [t for t in texts() if not args.paths or any(str(t[1]).startswith(p) for p in args.paths)]
    random = Random(args.seed)
    for kind in KINDS:
        of_kind = [t for t in population if t[0] == kind]
        drawn = of_kind if args.all else sorted(random.sample(of_kind, min(args.count, len(of_kind))))
        print(f"\n== {len(drawn)} of {len(of_kind)} {kind} texts ==")
        for _, path, line, text in drawn:
            indented = "\n    ".join(text.strip().splitlines())
            print(f"\n{path}:{line}\n    {indented}")


if __name__ == "__main__":
    main()
