"""Checks of `env.<task>.tool_parser`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.plugins.component import did_you_mean, is_path
from rl_core.plugins.static_lookup import missing_target
from rl_train.config.component_checks import Finding
from rl_train.config.schema import RunConfig

OWN_PARSER = "response_template"
"""Name of the tokenizer's own parser of responses."""
PARSER_NAMES = (OWN_PARSER, "hermes", "mistral", "llama3")


def tool_parser_conflicts(run: RunConfig) -> Iterator[Finding]:
    """Report each configured `tool_parser` that does not exist."""
    for task, section in run.env.items():
        name = section.tool_parser
        if name is None or name in PARSER_NAMES:
            continue
        if not is_path(name):
            hint = did_you_mean(name, [*PARSER_NAMES])
            names = ", ".join(PARSER_NAMES)
            yield ("env", task, "tool_parser"), f"unknown parser {name!r}.{hint} Use {names}, or the dotted path of a class."
        elif (problem := missing_target(name)) is not None:
            yield ("env", task, "tool_parser"), f"{name} cannot be imported: {problem}"
