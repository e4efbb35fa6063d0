"""YAML text with a comment behind each value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_WIDEST = 60
"""Column of the comments at most; comments of longer lines follow them directly."""


def annotated_yaml(values: dict[str, Any], comment_of: Callable[[str], str]) -> list[str]:
    """The lines of a config, one value per line.

    Args:
        values: The sections.
        comment_of: The comment of a dotted key; '' for none. Sections have none.
    """
    import yaml

    from rl_train.config.sources import escape

    lines: list[tuple[str, str]] = []

    def walk(value: Any, key: str, depth: int) -> None:
        indent = "  " * depth
        if isinstance(value, dict) and value:
            if key:
                lines.append((f"{'  ' * (depth - 1)}{key.rpartition('.')[2]}:", ""))
            for name, item in value.items():
                walk(item, f"{key}.{name}" if key else name, depth + 1 if key else 1)
        else:
            text = yaml.safe_dump(escape(value), default_flow_style=True, width=10_000).removesuffix("...\n").strip()
            lines.append((f"{indent[2:]}{key.rpartition('.')[2]}: {text}", comment_of(key)))

    walk(values, "", 0)
    width = min(_WIDEST, max(len(line) for line, _ in lines))
    return [f"{line:<{width}}  # {comment}" if comment else line for line, comment in lines]
