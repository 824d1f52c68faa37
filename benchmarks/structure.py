"""Measure the structure of the package: `python benchmarks/structure.py [--json FILE]`, in the root of a checkout.

Definitions:
- module: a Python file under agentrl/ (its links envs, tools and rewards included), empty `__init__.py` files left out.
- unit: a module that lies flat in agentrl/ (`__init__.py` left out), or a folder directly under it. A person meets the units first.
- layer: the length of the longest chain of imports that begins at a unit (units that import each other count as one).
- edge: a pair of different units of which one imports the other, counted once, whatever the number of import statements (grimp's graph; imports
  inside functions and under TYPE_CHECKING included).
- code lines: physical lines that hold a token which is neither a comment, a docstring nor a string that stands alone as a statement.
- wide lines: lines of code above 120 columns. long functions: functions and methods of more than 60 physical lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from pathlib import Path
from typing import Any

import grimp

ROOT = Path("agentrl")
SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def files() -> list[Path]:
    found = [p for p in ROOT.rglob("*.py") if not any(part in ("envs", "tools", "rewards") for part in p.parts[1:-1])]
    found += [p for name in ("envs", "tools", "rewards") for p in Path(name).rglob("*.py")]
    return sorted(p for p in found if "__pycache__" not in p.parts)


def string_lines(tree: ast.Module) -> set[int]:
    """Lines of strings that stand alone as statements: docstrings and the strings under fields."""
    alone = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) and isinstance(n.value.value, str)
    ]
    return {line for n in alone for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}


def code_lines(text: str) -> set[int]:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - string_lines(ast.parse(text))


def unit_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports() -> tuple[set[str], set[tuple[str, str]]]:
    graph = grimp.build_graph("agentrl", cache_dir=None)
    units = {unit_of(m) for m in graph.modules} - {""}
    edges = {
        (unit_of(a), unit_of(b))
        for a in graph.modules
        for b in graph.find_modules_directly_imported_by(a)
        if unit_of(a) and unit_of(b)
    }
    return units, {(a, b) for a, b in edges if a != b}


def layers(units: set[str], edges: set[tuple[str, str]]) -> int:
    below = {u: {b for a, b in edges if a == u} for u in units}
    reach = {u: set(below[u]) for u in units}
    for _ in units:
        for u in units:
            reach[u] |= {c for b in reach[u] for c in below[b]}
    group = {u: frozenset({u, *(b for b in reach[u] if u in reach[b])}) for u in units}
    depth: dict[frozenset[str], int] = {}

    def height(g: frozenset[str]) -> int:
        if g not in depth:
            depth[g] = 1 + max((height(group[b]) for u in g for b in below[u] if group[b] != g), default=0)
        return depth[g]

    return max(height(group[u]) for u in units)


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {
        "modules": 0,
        "code_lines": 0,
        "wide_lines": 0,
        "long_functions": 0,
        "modules_over_500_lines": 0,
    }
    for path in files():
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            continue
        code = code_lines(text)
        lines = text.splitlines()
        found["modules"] += 1
        found["code_lines"] += len(code)
        found["wide_lines"] += sum(len(lines[n - 1]) > 120 for n in code)
        found["modules_over_500_lines"] += len(lines) > 500
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        found["long_functions"] += sum((f.end_lineno or 0) - f.lineno + 1 > 60 for f in functions)
    units, edges = imports()
    flat = sorted(p.stem for p in ROOT.glob("*.py") if p.stem != "__init__")
    return found | {"units": len(units), "flat_modules": len(flat), "edges": len(edges), "layers": layers(units, edges)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args()
    figures = measure()
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):<24} {value:>7,}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
