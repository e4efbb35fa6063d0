"""Problems of plugins that load: names that collide, targets that do not exist, slow imports, and text printed at import."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.plugins.import_path import missing_target
from rl_core.plugins.manager import PluginManager
from rl_core.plugins.record import Plugin, Status
from rl_core.plugins.registry import name_collision

SLOW_IMPORT_MS = 200.0
_LONGEST_TEXT = 60


@dataclass(frozen=True, kw_only=True)
class PluginProblem:
    """One problem.

    Attributes:
        text: A sentence.
        is_error: Whether a component cannot be used because of it.
    """

    text: str
    is_error: bool


def problems_of(plugin: Plugin, manager: PluginManager) -> list[PluginProblem]:
    """The problems of one plugin, without those in its `reason`. Reads the sources of its targets and imports nothing."""
    if plugin.status is Status.DISABLED:
        return []
    errors = []
    for kind, component in plugin.components:
        same = [each for each in manager.registrations if (each.kind, each.component.name) == (kind, component.name)]
        if len(same) > 1:
            errors.append(str(name_collision(kind, component.name, same)))
        for reference in (component.target, component.config):
            if reference is not None and (problem := missing_target(reference)) is not None:
                errors.append(f"{kind.label.capitalize()} {component.name!r}: {reference} does not exist: {problem}")
    notes = []
    if plugin.import_ms is not None and plugin.import_ms > SLOW_IMPORT_MS:
        notes.append(
            f"Importing {plugin.module or plugin.name} took {plugin.import_ms:.0f} ms, which every command waits for. Import "
            "libraries in the targets instead."
        )
    if plugin.printed:
        text = plugin.printed if len(plugin.printed) <= _LONGEST_TEXT else f"{plugin.printed[:_LONGEST_TEXT]}..."
        notes.append(f"It prints when it is imported, which is not shown: {text!r}. Remove the print.")
    return [PluginProblem(text=text, is_error=text in errors) for text in [*errors, *notes]]
