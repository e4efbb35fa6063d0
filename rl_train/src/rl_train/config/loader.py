"""Loads a config file into the frozen models of a run, in stages that each report all problems. Does not import backends.

The stages: files and the files they inherit from, overrides, `${...}`, validation of each section, checks across sections.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rl_core.config.diagnostics import Problems
from rl_core.config.source_tree import KeyPath, Node, SourceLocation, dotted
from rl_core.config.validator import Validator
from rl_core.plugins.component import Component
from rl_core.plugins.import_path import search_modules_in
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.aliases import expand_aliases
from rl_train.config.checks import cross_check
from rl_train.config.component_checks import Finding
from rl_train.config.config_layout import ConfigLayout
from rl_train.config.interpolation import escape, resolve
from rl_train.config.override_checks import reject_items_of_missing_lists, reject_new_keys
from rl_train.config.overrides import apply_overrides
from rl_train.config.own_weights_checks import own_weights_conflicts
from rl_train.config.path_resolution import locate_paths
from rl_train.config.provenance import Origin, trace
from rl_train.config.reward_function_checks import reject_unused_functions
from rl_train.config.schema import RunConfig
from rl_train.config.secrets import Secrets
from rl_train.config.section_resolver import SECTIONS, resolve_sections
from rl_train.config.sources import ConfigFiles, as_paths, folders_of_files, read_sources
from rl_train.config.usage_checks import unused_sections


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A valid config with all defaults.

    Attributes:
        run: The sections as their models.
        resolved: The whole config as plain data with defaults, with the keys of a config file: loading it again gives
            the same run.
        source: Where each leaf of `resolved` came from, by its dotted key.
        components: The component of each section that names one, by the section's dotted key (`policy.generation`).
        layout: The models of the sections.
        written: The config as it was written, with the source location of each value.
        path: The file; the last one if several are layered.
        redacted: `resolved` with the `${...}` of each secret instead of its value; safe to write, print and send.
        secrets: Values from the environment that must not be shown.
        overrides: As they were given.
    """

    run: RunConfig
    resolved: dict[str, Any]
    source: Mapping[str, Origin]
    components: Mapping[str, Component]
    layout: ConfigLayout
    written: Node
    path: Path
    redacted: dict[str, Any]
    secrets: Secrets
    overrides: tuple[str, ...] = ()

    def refuse(self, findings: Iterable[Finding]) -> None:
        """Raises an error with all findings, each at the line of its value or section.

        Raises:
            InvalidConfigError: There are findings.
        """
        problems = Problems()
        for at, message in findings:
            problems.add(message, location=self.location_of(at), path=at)
        problems.raise_if_any()

    def location_of(self, path: KeyPath) -> SourceLocation:
        """Location of a key; if the config does not set it, the location of the innermost section that contains it."""
        return _location(self.written, path)

    def to_yaml(self) -> str:
        """`redacted` as the text of a config file that inherits nothing and only interpolates secrets."""
        return yaml.safe_dump(escape(self.redacted), sort_keys=False, allow_unicode=True, width=120)


def load_config(
    path: ConfigFiles,
    overrides: Sequence[str] = (),
    *,
    registry: Registry | None = None,
    for_training: bool = True,
    complete: bool = True,
) -> LoadedConfig:
    """The run that config files describe.

    Args:
        path: The YAML file, or several: the values of each override those of the files before it.
        overrides: `key=value` and `++key=value`, applied in order.
        registry: Used to look up components; the installed plugins by default.
        for_training: Reject sections that training does not use, and engines and sampling settings that it cannot use.
        complete: Reject missing files and settings that do not fit together. Without it, only each section is checked.

    Raises:
        InvalidConfigError: A `ConfigError` that lists every mistake with its location.
    """
    registry = registry if registry is not None else Registry(discover())
    secrets = Secrets()
    problems = Problems(redact=secrets.redact)
    written = read_sources(path, problems=problems)
    if problems.is_partial:
        problems.raise_if_any()
    search_modules_in(folders_of_files(written))
    written, applied = apply_overrides(written, overrides, problems=problems)
    values, written, interpolations = _plain_values(written, registry=registry, problems=problems, secrets=secrets)
    layout = resolve_sections(values, written=written, registry=registry, problems=problems)
    locate_paths(values, layout, written=written, problems=problems if complete else Problems())
    reject_items_of_missing_lists(applied, layout, written=written, problems=problems)
    reject_unused_functions(values, layout, written=written, problems=problems)
    reject_new_keys(applied, layout, problems=problems)
    sections = _validated_sections(values, layout, written=written, problems=problems)
    problems.raise_if_any()
    run = _build_run(sections, layout)
    of_training = (*unused_sections(run), *own_weights_conflicts(run)) if for_training else ()
    across = (*cross_check(run, layout, registry, for_training=for_training), *of_training) if complete else ()
    for at, message in across:
        problems.add(message, location=_location(written, at), path=at)
    problems.raise_if_any()
    resolved = _resolved(run, sections)
    return LoadedConfig(
        run=run,
        resolved=resolved,
        source=trace(resolved, written=written, interpolations=interpolations, layout=layout),
        components={
            dotted(key): section.component for key, section in layout.sections.items() if section.component is not None
        },
        layout=layout,
        written=written,
        path=as_paths(path)[-1],
        redacted=secrets.redacted(resolved, interpolations),
        secrets=secrets,
        overrides=tuple(overrides),
    )


def _plain_values(
    written: Node, *, registry: Registry, problems: Problems, secrets: Secrets
) -> tuple[dict[str, Any], Node, dict[KeyPath, str]]:
    # Interpolations may refer to defaults, which depend on the components. Component names are known before `${...}` is
    # resolved, unless they are interpolated themselves.
    expected = resolve_sections(written.plain(), written=written, registry=registry, problems=Problems())
    known = [field.path for field in expected.fields()]
    values, interpolations = resolve(written, default_at=expected.default, known=known, problems=problems, secrets=secrets)
    return expand_aliases(values, written=written, interpolations=interpolations)


def _validated_sections(
    values: dict[str, Any], layout: ConfigLayout, *, written: Node, problems: Problems
) -> dict[KeyPath, BaseModel]:
    """Every section as its model; inner ones first, since outer ones contain them."""
    validator = Validator(written=written, problems=problems, find_elsewhere=layout.ending_in)
    valid: dict[KeyPath, BaseModel] = {}
    for path in sorted(layout.sections, key=len, reverse=True):
        if problems.is_invalid(path):
            continue
        section = layout.sections[path]
        given = _given(values, path, layout=layout, valid=valid)
        implied = {key: value for key, value in section.implied.items() if given.get(key) is None}
        instance = validator.validate(section.model, {**given, **implied}, path=path)
        if instance is not None:
            valid[path] = instance
    return valid


def _given(
    values: dict[str, Any], path: KeyPath, *, layout: ConfigLayout, valid: Mapping[KeyPath, BaseModel]
) -> dict[str, Any]:
    """The values that the file sets in a section, with the sections within it replaced by their models."""
    section: Any = values
    for key in path:
        section = section.get(key)
        if section is None:
            return {}
    given: dict[str, Any] = copy.deepcopy(section)
    for inner in layout.sections:
        if inner[: len(path)] != path or inner == path:
            continue
        *parents, name = inner[len(path) :]
        holder: Any = given
        for key in parents:
            holder = holder[key]
        if inner in valid:
            holder[name] = valid[inner]
        else:
            holder.pop(name, None)
    return given


def _build_run(sections: Mapping[KeyPath, BaseModel], layout: ConfigLayout) -> RunConfig:
    top = {str(path[0]): section for path, section in sections.items() if len(path) == 1}
    name = str(layout.algorithm)
    given: dict[str, Any] = {key: top.get(key) for key in SECTIONS}
    environments = {path[1]: section for path, section in sections.items() if path[0] == "env"}
    return RunConfig(**{**given, "algorithm_name": name, "algorithm": top[name], "env": environments})


def _resolved(run: RunConfig, sections: Mapping[KeyPath, BaseModel]) -> dict[str, Any]:
    # Fields are annotated with base classes; the additional keys of the plugins' models must be dumped too.
    dumped = run.model_dump(mode="json", serialize_as_any=True)
    name = dumped.pop("algorithm_name")
    paths = sections.get(("algorithm",))
    by_path = {} if paths is None else {"algorithm": paths.model_dump(mode="json")}
    return {**by_path, name: dumped.pop("algorithm"), **dumped}


def _location(written: Node, path: KeyPath) -> SourceLocation:
    here = written.at(path)
    return here.location if here is not None else written.nearest(path).key_location
