"""Loads config files or Python values into the frozen models of a run, and reports all problems. Does not import backends.

The steps: files and the files they inherit from, overrides, `${...}`, validation of each section, and the rules of
`rl_train.config.rules`. Rules are also checked if sections are invalid, as far as they do not read the invalid keys.

Keys whose null stands for a value that depends on the devices of a run, or on the policy, are filled in when these are known.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel

from rl_core.config.diagnostics import KeyPath, Node, Problem, Problems, SourceLocation, dotted, override_named
from rl_core.config.section import Devices
from rl_core.config.validator import Validator
from rl_core.plugins.component import Component
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.foreign_names import INSTEAD
from rl_train.config.rules import RULES
from rl_train.config.rules.models import model_path, models_of, with_models
from rl_train.config.rules.rule import (
    CheckedConfig,
    Rule,
    RuleReport,
    Stage,
    Use,
    WrittenConfig,
    partial_section,
    run_rules,
    unavailable_section,
)
from rl_train.config.schema import RunConfig, model_at
from rl_train.config.secrets import Secrets
from rl_train.config.section_resolver import resolve_sections
from rl_train.config.slots import WITH_NAMES, ConfigLayout
from rl_train.config.sources import ConfigFiles, as_paths, escape, folders_of_files, read_sources, resolve, search_modules_in
from rl_train.config.values import (
    Origin,
    apply_overrides,
    expand_aliases,
    leaves_by_path,
    locate_paths,
    trace,
    with_validation_of_overrides,
)


@dataclass(frozen=True, kw_only=True)
class LocatedConfig:
    """A config with its source locations, whose sections may be invalid.

    Attributes:
        layout: The models of the sections.
        written: The config as it was written, with the source location of each value.
        path: The file; the last one if several are layered. Empty for Python values.
        secrets: Values from the environment that must not be shown.
        overrides: As they were given.
    """

    layout: ConfigLayout
    written: Node
    path: Path
    secrets: Secrets
    overrides: tuple[str, ...] = ()

    def location_of(self, path: KeyPath) -> SourceLocation:
        """Location of a key; if the config does not set it, the location of the innermost section that contains it."""
        return _location(self.written, path)


@dataclass(frozen=True, kw_only=True)
class LoadedConfig(LocatedConfig):
    """A valid config with all defaults.

    Attributes:
        run: The sections as their models.
        resolved: The whole config as plain data with defaults, with the keys of a config file: loading it again gives
            the same run.
        source: Where each leaf of `resolved` came from, by its dotted key.
        components: The component of each section that names one, by the section's dotted key (`policy.generation`).
        redacted: `resolved` with the `${...}` of each secret instead of its value; safe to write, print and send.
    """

    run: RunConfig
    resolved: dict[str, Any]
    source: Mapping[str, Origin]
    components: Mapping[str, Component]
    redacted: dict[str, Any]

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raises an error with all problems, each at the line of its value or section.

        Raises:
            InvalidConfigError: There are problems.
        """
        located = Problems()
        for problem in problems:
            located.include(replace(problem, location=_location(self.written, problem.path, problem.message)))
        located.raise_if_any()

    def to_yaml(self) -> str:
        """`redacted` as the text of a config file that inherits nothing and only interpolates secrets."""
        return yaml.safe_dump(escape(self.redacted), sort_keys=False, allow_unicode=True, width=120)


@dataclass(frozen=True, kw_only=True)
class ConfigDraft(LocatedConfig):
    """A config that was read, whose sections may be invalid.

    Attributes:
        checked: What rules read. Invalid sections raise an error where a rule reads an invalid key.
        problems: The problems so far.
        sections: The valid sections.
        interpolations: The `${...}` of each interpolated value.
    """

    checked: CheckedConfig
    problems: Problems
    sections: Mapping[KeyPath, BaseModel]
    interpolations: Mapping[KeyPath, str]

    def check(self, rules: Iterable[Rule], *stages: Stage) -> list[Problem]:
        """Add the problems that the rules of some stages find, and return their warnings."""
        return self.add(run_rules(rules, self.checked, *stages))

    def add(self, report: RuleReport) -> list[Problem]:
        """Add the problems that rules found, and return their warnings."""
        _add(report, self.problems, self.written)
        return report.warnings

    def complete(self) -> LoadedConfig:
        """The config.

        Raises:
            InvalidConfigError: A `ConfigError` that lists every mistake with its location.
        """
        self.problems.raise_if_any()
        run, layout = self.checked.run, self.layout
        resolved = _resolved(run, self.sections)
        return LoadedConfig(
            run=run,
            resolved=resolved,
            source=trace(resolved, written=self.written, interpolations=self.interpolations, layout=layout),
            components={
                dotted(key): section.component for key, section in layout.sections.items() if section.component is not None
            },
            layout=layout,
            written=self.written,
            path=self.path,
            redacted=self.secrets.redacted(resolved, self.interpolations),
            secrets=self.secrets,
            overrides=self.overrides,
        )


def load_config(
    source: ConfigFiles | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    registry: Registry | None = None,
    use: Use = Use.TRAIN,
    stages: Collection[Stage] = (Stage.STATIC,),
) -> LoadedConfig:
    """The run that config files or Python values describe.

    Args:
        source: The YAML file, or several: the values of each override those of the files before it. Or the sections by name, as
            mappings or as their models; `${...}` in them is plain text.
        overrides: `key=value` and `++key=value`, applied in order.
        registry: Used to look up components; the installed plugins by default.
        use: What it is loaded for, which decides which rules apply to it.
        stages: Stages of the rules to check. Without any, only each section is checked, and files may be missing.

    Raises:
        InvalidConfigError: A `ConfigError` that lists every mistake with its location.
    """
    draft = draft_config(source, overrides, registry=registry, use=use, needs_files=bool(stages))
    draft.check(RULES, *stages)
    return draft.complete()


def draft_config(
    source: ConfigFiles | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    registry: Registry | None = None,
    use: Use = Use.TRAIN,
    needs_files: bool = True,
) -> ConfigDraft:
    """The sections of config files or Python values, and the problems of each of them.

    Args:
        source: See `load_config`, as for the next arguments.
        overrides: See there.
        registry: See there.
        use: See there.
        needs_files: Whether a missing file is a problem.

    Raises:
        InvalidConfigError: A file could not be read.
    """
    registry = registry if registry is not None else Registry(discover())
    secrets = Secrets()
    problems = Problems(redact=secrets.redact)
    written = read_sources(source, problems=problems)
    if problems.is_partial:
        problems.raise_if_any()
    written, applied = apply_overrides(written, overrides, problems=problems)
    if use is Use.EVAL:
        written = with_validation_of_overrides(written, applied)
    values: dict[str, Any] = written.plain()
    interpolations: dict[KeyPath, str] = {}
    if not isinstance(source, Mapping):
        search_modules_in(folders_of_files(written))
        values, interpolations = _resolved_values(written, registry=registry, problems=problems, secrets=secrets)
    written = expand_aliases(values, written=written, interpolations=interpolations)
    layout = resolve_sections(values, written=written, registry=registry, problems=problems)
    locate_paths(values, layout, written=written, problems=problems if needs_files else Problems())
    as_written = WrittenConfig(values=values, written=written, layout=layout, overrides=applied, use=use)
    report = run_rules(RULES, as_written, Stage.WRITTEN)
    _add(report, problems, written)
    problems.poisoned |= {problem.path for problem in report.problems}
    sections = _validated_sections(values, layout, written=written, problems=problems)
    run = _partial_run(values, layout, written, problems) if problems.found else RunConfig(**_of_run(sections, layout))
    if isinstance(source, Mapping) and "cluster" not in source:  # components that were created in Python bring their own
        run.model_fields_set.discard("cluster")
    return ConfigDraft(
        layout=layout,
        checked=CheckedConfig(run=run, registry=registry, use=use, layout=layout),
        problems=problems,
        sections=sections,
        written=written,
        interpolations=interpolations,
        secrets=secrets,
        path=Path() if isinstance(source, Mapping) else as_paths(source)[-1],
        overrides=tuple(overrides),
    )


def _add(report: RuleReport, problems: Problems, written: Node) -> None:
    for problem in report.problems:
        problems.include(replace(problem, location=problem.location or _location(written, problem.path, problem.message)))
    problems.not_checked += [text for text in map(str, report.not_checked) if text not in problems.not_checked]


def _resolved_values(
    written: Node, *, registry: Registry, problems: Problems, secrets: Secrets
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    # Interpolations may refer to defaults, which depend on the components. Component names are known before `${...}` is
    # resolved, unless they are interpolated themselves.
    expected = resolve_sections(written.plain(), written=written, registry=registry, problems=Problems())
    known = (field.path for section in expected.sections.values() for field in section.fields())
    return resolve(written, default_at=expected.default, known=known, problems=problems, secrets=secrets)


def _validated_sections(
    values: dict[str, Any], layout: ConfigLayout, *, written: Node, problems: Problems
) -> dict[KeyPath, BaseModel]:
    """Every section as its model; inner ones first, since outer ones contain them."""
    validator = Validator(written=written, problems=problems, find_elsewhere=layout.ending_in, instead=INSTEAD)
    done: dict[KeyPath, BaseModel] = {}
    for path in sorted(layout.sections, key=len, reverse=True):
        if problems.is_invalid(path):
            continue
        instance = model_at(written, path) or validator.validate(
            layout.sections[path].model, _given(values, path, layout=layout, done=done), path=path
        )
        if instance is not None:
            done[path] = instance
    return done


def _partial_run(values: dict[str, Any], layout: ConfigLayout, written: Node, problems: Problems) -> RunConfig:
    """The run of a config with problems: reading a key whose value is not known raises an error."""
    unknown = {problem.path for problem in problems.found if problem.path} | problems.poisoned | problems.misspelled
    done: dict[KeyPath, BaseModel] = {}
    for path in sorted(layout.sections, key=len, reverse=True):
        part = layout.sections[path]
        if path in unknown:
            done[path] = unavailable_section(part.model, path)
            continue
        done[path] = model_at(written, path) or partial_section(
            part.model,
            _given(values, path, layout=layout, done=done),
            path=path,
            unknown=_fields_of(path, unknown, layout),
            is_component=part.kind is None or part.component is not None,
        )
    of_run, names = _of_run(done, layout), _fields_of((), unknown, layout)
    loss = layout.sections.get(("loss_fn",))
    if loss is None or loss.component is None:  # rules ask which loss it is
        names.add("loss_fn")
    names |= {name for name, field in RunConfig.model_fields.items() if field.is_required() and name not in of_run}
    return cast(RunConfig, partial_section(RunConfig, of_run, path=(), unknown=names))


def _fields_of(section: KeyPath, keys: Iterable[KeyPath], layout: ConfigLayout) -> set[str]:
    """The fields of a section that contain some of the keys, without the sections within it."""
    enclosing = ((key, layout.enclosing_section(key)) for key in keys if key not in layout.sections)
    return {str(key[len(section)]) for key, part in enclosing if (() if part is None else part.path) == section}


def _given(values: dict[str, Any], path: KeyPath, *, layout: ConfigLayout, done: Mapping[KeyPath, BaseModel]) -> dict[str, Any]:
    """The values of a section: those of the file, implied ones, and the models of the components' sections within it."""
    implied = layout.sections[path].implied
    found: Any = values
    for part in path:
        found = found.get(part)
        if found is None:
            return {**implied}
    given: dict[str, Any] = copy.deepcopy(found)
    given |= {key: value for key, value in implied.items() if given.get(key) is None}
    for inner in layout.sections:
        if inner[: len(path)] != path or inner == path:
            continue
        *parents, name = inner[len(path) :]
        holder: Any = given
        for key in parents:
            holder = holder[key]
        if inner in done:
            holder[name] = done[inner]
        else:
            holder.pop(name, None)
    return given


def _of_run(sections: Mapping[KeyPath, BaseModel], layout: ConfigLayout) -> dict[str, Any]:
    """The sections by the fields of `RunConfig`, as far as they exist."""
    of: dict[str, Any] = {
        str(path[0]): section for path, section in sections.items() if len(path) == 1 and path != ("algorithm",)
    }
    if layout.algorithm in of:
        of |= {"algorithm_name": layout.algorithm, "algorithm": of[layout.algorithm]}
    of |= {
        name: {str(path[1]): section for path, section in sections.items() if path[0] == name}
        for name in ("env", "teachers", *WITH_NAMES)
    }
    return {name: of[name] for name in RunConfig.model_fields if name in of}


def _resolved(run: RunConfig, sections: Mapping[KeyPath, BaseModel]) -> dict[str, Any]:
    # Fields are annotated with base classes; the additional keys of the plugins' models must be dumped too.
    dumped = run.model_dump(mode="json", serialize_as_any=True)
    name = dumped.pop("algorithm_name")
    paths = sections.get(("algorithm",))
    by_path = {} if paths is None else {"algorithm": paths.model_dump(mode="json")}
    return {**by_path, name: dumped.pop("algorithm"), **dumped}


def _location(written: Node, path: KeyPath, message: str = "") -> SourceLocation:
    here = written.at(path)
    if here is not None and here.location.number is not None:
        return here.location
    override = override_named(written, path, message)
    return override or (here.location if here is not None else written.nearest(path).key_location)


_ENGINE = ("policy", "generation")


def device_values(run: RunConfig, devices: Devices) -> dict[KeyPath, Any]:
    """The values on some devices of keys that are null, by key."""
    engine = run.policy.generation
    sections: dict[KeyPath, Any] = {model_path(name): model for name, model in models_of(run).items()}
    sections |= {_ENGINE: engine} if engine is not None else {}
    filled = (_added(path, section, section.for_devices(devices)) for path, section in sections.items())
    return {key: value for values in filled for key, value in values.items()}


def effective_values(run: RunConfig, devices: Devices) -> dict[KeyPath, Any]:
    """As `device_values`, and what the engine takes from the policy."""
    engine, values = run.policy.generation, device_values(run, devices)
    if engine is None:
        return values
    resolved = engine.for_devices(devices).for_policy(run.policy.for_devices(devices))
    return values | _added(_ENGINE, engine, resolved)


def _added(path: KeyPath, given: Any, resolved: Any) -> dict[KeyPath, Any]:
    before, after = (dict(leaves_by_path(section.model_dump(mode="json"), path)) for section in (given, resolved))
    return {key: value for key, value in after.items() if value is not None and before.get(key, value) is None}


def precisions_of(run: RunConfig) -> dict[str, str | None]:
    """The `precision` of each model, by section."""
    return {name: model.precision for name, model in models_of(run).items()}


def saved_precisions(config: dict[str, Any]) -> dict[str, str | None]:
    """The same of the config of a checkpoint."""
    teachers = {f"teachers.{task}": section for task, section in (config.get("teachers") or {}).items()}
    return {name: section.get("precision") for name, section in (config | teachers).items() if isinstance(section, Mapping)}


def with_precisions(loaded: LoadedConfig, precisions: Mapping[str, str | None]) -> LoadedConfig:
    """The config with the `precision` of models that do not set it, by section."""
    unset = {name: model for name, model in models_of(loaded.run).items() if model.precision is None and precisions.get(name)}
    sections = {name: model.model_copy(update={"precision": precisions[name]}) for name, model in unset.items()}
    resolved, redacted = copy.deepcopy((loaded.resolved, loaded.redacted))
    for values, name in itertools.product((resolved, redacted), unset):
        reduce(getitem, model_path(name), values)["precision"] = precisions[name]
    return replace(loaded, run=with_models(loaded.run, sections), resolved=resolved, redacted=redacted)
