"""Prints ten public functions, drawn by a commit hash, with their docstrings: a sample for reviews of names and documentation.

Usage: python docs/sample_public_functions.py [COMMIT] [COUNT]

The sample is drawn from all documented public functions and methods of the distributions, with the commit hash as seed.
"""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def public_functions() -> list[tuple[str, str, str]]:
    """The qualified name, signature and docstring of every documented public function, sorted by name."""
    found = []
    for source in ROOT.glob("*/src"):
        for path in source.rglob("*.py"):
            module = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
            found += list(_functions(ast.parse(path.read_text()), module))
    return sorted(found)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, str, str]]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, name)
        elif (documentation := ast.get_docstring(child)) is not None:
            returns = f" -> {ast.unparse(child.returns)}" if child.returns is not None else ""
            yield name, f"({ast.unparse(child.args)}){returns}", documentation


def main() -> None:
    """Draw and print the sample."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    commit = sys.argv[1] if len(sys.argv) > 1 else head
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    functions = public_functions()
    print(f"{count} of {len(functions)} public functions, drawn by {commit}\n")
    for name, signature, documentation in random.Random(commit).sample(functions, count):
        print(f"{name}{signature}")
        print("\n".join(f"    {line}".rstrip() for line in documentation.splitlines()), end="\n\n")


if __name__ == "__main__":
    main()
