"""Draws which folders import which, as the SVG files of docs/architecture.md.

    python docs/make_architecture.py

An arrow leads from a folder to one that it imports, also within functions and for type checkers. Arrows that follow from
others are left out. A folder is drawn as low as its imports allow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from html import escape
from itertools import pairwise
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "architecture"
PACKAGES = {path.name: path for path in sorted(ROOT.glob("*/src/*")) if (path / "__init__.py").is_file()}
MODULES = {"rl_train.run", "rl_train.step", "rl_core.backend"}
"""Modules outside of folders that are drawn as well."""
WIDTH, HEIGHT, GAP, RISE, THIN = 136, 24, 14, 56, 10
"""Pixels: of a box, between boxes of a row, from row to row, and of an arrow that passes a row."""
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333; text-anchor: middle } rect { fill: #2a6fdb1f; stroke: #2a6fdb }
path { fill: none; stroke: #8889 } marker path { fill: #888; stroke: none }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
"""
ARROW = (
    '<marker id="to" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0 0L6 3L0 6z"/></marker>'
)


def import_graph() -> grimp.ImportGraph:
    """The imports between all modules of the repository's distributions."""
    sys.path[:0] = [str(path.parent) for path in PACKAGES.values()]
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def folders(graph: grimp.ImportGraph, group: Callable[[str], str | None]) -> networkx.DiGraph[str]:
    """The imports between groups of modules, without those that follow from others; modules of the group None are left out."""
    imports: networkx.DiGraph[str] = networkx.DiGraph()
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            ends = group(module), group(imported)
            if ends[0] is not None and ends[1] is not None and ends[0] != ends[1]:
                imports.add_edge(*ends)
    return networkx.transitive_reduction(imports)


def distribution_of(module: str) -> str:
    """The package that a distribution installs."""
    return module.partition(".")[0]


def folder_in(package: str) -> Callable[[str], str | None]:
    """Maps a module to its folder in a package, or to itself if it is in `MODULES`; other modules to None."""

    def folder(module: str) -> str | None:
        name = ".".join(module.split(".")[:2])
        is_drawn = name in MODULES or (PACKAGES[package] / name.rpartition(".")[2]).is_dir()
        return name.removeprefix(f"{package}.") if module.startswith(f"{package}.") and is_drawn else None

    return folder


def drawing(imports: networkx.DiGraph[str]) -> str:
    """The graph as an SVG that stands alone."""
    rows = [sorted(row) for row in networkx.topological_generations(imports.reverse())]
    row_of = {name: number for number, row in enumerate(rows) for name in row}
    columns: list[list[Hashable]] = [list(row) for row in rows]
    chains: list[list[Hashable]] = []
    for upper, lower in sorted(imports.edges):
        passed = [(upper, lower, number) for number in range(row_of[upper] - 1, row_of[lower], -1)]
        for passing in passed:
            columns[passing[2]].append(passing)
        chains.append([upper, *passed, lower])
    x = _ordered(columns, chains)
    y = {node: (len(columns) - 1 - number) * RISE + GAP for number, row in enumerate(columns) for node in row}
    width = max(x.values()) + WIDTH / 2 + GAP
    lines = [_arrow([(x[node], y[node]) for node in chain]) for chain in chains]
    boxes = [
        f'<rect x="{x[name] - WIDTH / 2:.0f}" y="{y[name]}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>'
        f'<text x="{x[name]:.0f}" y="{y[name] + 16}">{escape(name)}</text>'
        for name in sorted(row_of)
    ]
    height = (len(columns) - 1) * RISE + HEIGHT + 2 * GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}"><style>{STYLE}</style>'
    return "\n".join([head, ARROW, *lines, *boxes, "</svg>", ""])


def _ordered(columns: list[list[Hashable]], chains: list[list[Hashable]]) -> dict[Hashable, float]:
    """Horizontal centers: each row is sorted by the mean of its neighbors, a few times down and up, and centered."""
    near: dict[Hashable, list[Hashable]] = {node: [] for row in columns for node in row}
    for chain in chains:
        for upper, lower in pairwise(chain):
            near[upper].append(lower)
            near[lower].append(upper)
    x = _centered(columns)
    for sweep in range(12):
        for row in columns if sweep % 2 else reversed(columns):
            row.sort(key=lambda node: sum(x[other] for other in near[node]) / max(len(near[node]), 1))
        x = _centered(columns)
    return x


def _centered(columns: list[list[Hashable]]) -> dict[Hashable, float]:
    widths = [[(WIDTH if isinstance(node, str) else THIN) + GAP for node in row] for row in columns]
    total, x = max(map(sum, widths)), {}
    for row, sizes in zip(columns, widths, strict=True):
        left = (total - sum(sizes)) / 2 + GAP / 2
        for node, size in zip(row, sizes, strict=True):
            x[node] = left + size / 2
            left += size
    return x


def _arrow(points: list[tuple[float, int]]) -> str:
    (left, top), *rest = points
    path = [f"M{left:.0f} {top + HEIGHT}"]
    start = top + HEIGHT
    for number, (right, bottom) in enumerate(rest):
        middle = (start + bottom) / 2
        path.append(f"C{left:.0f} {middle:.0f} {right:.0f} {middle:.0f} {right:.0f} {bottom}")
        if number < len(rest) - 1:
            path.append(f"L{right:.0f} {bottom + HEIGHT}")
        left, start = right, bottom + HEIGHT
    return f'<path d="{"".join(path)}" marker-end="url(#to)"/>'


def pictures() -> dict[str, str]:
    """The files of docs/architecture, by name."""
    graph = import_graph()
    groups = {"distributions": distribution_of, "rl_train": folder_in("rl_train"), "rl_core": folder_in("rl_core")}
    return {f"{name}.svg": drawing(folders(graph, group)) for name, group in groups.items()}


if __name__ == "__main__":
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
