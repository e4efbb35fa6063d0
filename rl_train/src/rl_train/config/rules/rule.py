"""What a rule of a config is, and how rules are run over a config that may be invalid in other places.

A rule is a function with a docstring, which is its text in reports:

    @rule("algorithm", "profiling", applies_to=TRAINING)
    def profiled_steps_are_within_the_run(config: CheckedConfig) -> Iterator[Problem]:
        \"\"\"Steps to profile are not beyond the end of the run.\"\"\"

It reads the sections of `config.run`. A section in which a key is invalid raises `UnavailableError` if a rule reads that key,
so a rule never judges a default instead of what the user meant: the rule is then listed as not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType
from typing import Any, ClassVar

from pydantic import BaseModel, create_model, model_validator

from rl_core.config.diagnostics import InvalidConfigError, KeyPath, Node, Problem, dotted
from rl_core.config.introspection import Model
from rl_core.errors import PluginError, RLCoreError, UserError
from rl_core.plugins.component import Kind
from rl_core.plugins.registry import Registry
from rl_train.config.schema import RunConfig
from rl_train.config.slots import ConfigLayout
from rl_train.config.values import Override


class Stage(StrEnum):
    """What a rule needs in addition to the values of the config."""

    WRITTEN = "written"
    """The values as they were written: checked before they are validated."""
    STATIC = "static"
    """Nothing: no module that the config names is imported."""
    MACHINE = "machine"
    """The machine that the run will start on."""
    IMPORTED = "imported"
    """The classes that the config names, and the files of its models: tokenizers and configs, no weights."""
    DATA = "data"
    """The data."""


class Use(StrEnum):
    """What a config is loaded for."""

    TRAIN = "train"
    """`rlcore train` and `rlcore validate`."""
    PYTHON = "python"
    """A Python trainer, whose components and data are objects."""
    EVAL = "eval"
    """`rlcore eval`: engine, environments and validation data."""
    COMPARE = "compare"
    """`rlcore check logprobs`: policy and engine."""
    SERVE = "serve"
    """`rlcore serve`: an engine with the weights of a run."""


ANY_USE = frozenset(Use)
TRAIN_ONLY = frozenset({Use.TRAIN})
TRAINING = TRAIN_ONLY | {Use.PYTHON}
CONFIG_FILE = ANY_USE - {Use.PYTHON}
"""Uses with a config file, which has a section for everything that the command uses."""


@dataclass(frozen=True, kw_only=True)
class CheckedConfig:
    """What rules read.

    Attributes:
        run: The sections. Invalid ones raise `UnavailableError` if a rule reads an invalid key.
        registry: Provides the capabilities of components, and imports them for rules of a later stage.
        use: What the config is loaded for.
        layout: The components that the sections name; None for sections from Python objects.
    """

    run: RunConfig
    registry: Registry
    use: Use = Use.TRAIN
    layout: ConfigLayout | None = None

    @property
    def samples(self) -> bool:
        """Whether completions are sampled: by the algorithm, or by a command that does not train."""
        return self.use not in TRAINING or self.run.algorithm.runtime_needs.samples

    def load(self, kind: Kind | str, name: str) -> Any:
        """The class of a component.

        Raises:
            UnavailableError: It cannot be imported, which the rule about imports reports.
        """
        try:
            return self.registry.find(kind, name).load()
        except PluginError as error:
            raise UnavailableError(f"the {Kind(kind).label} {name!r}") from error


@dataclass(frozen=True, kw_only=True)
class WrittenConfig:
    """What rules about keys as they were written read.

    Attributes:
        values: The plain values of the whole config.
        written: The same values with their source locations.
        layout: The models of the sections.
        overrides: The overrides that were applied.
        use: What the config is loaded for.
    """

    values: Mapping[str, Any]
    written: Node
    layout: ConfigLayout
    overrides: Sequence[Override]
    use: Use = Use.TRAIN


def _once(_: object) -> Iterable[tuple[Any, ...]]:
    return [()]


Check = Callable[..., Iterable[Problem] | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        check: Returns or yields the problems of a config; it may also raise them as a `UserError`.
        reads: Sections and keys that it reads, for readers; a test compares the sections with what it really reads.
        stage: When it can be checked.
        applies_to: What the config must be loaded for.
        each: The items that it is checked for separately, as additional arguments of `check`: an invalid section of one task
            must not hide the problems of another.
        warns: Whether its problems are warnings: valid, but probably not intended.
    """

    check: Check
    reads: tuple[str, ...]
    stage: Stage = Stage.STATIC
    applies_to: frozenset[Use] = ANY_USE
    each: Callable[[Any], Iterable[tuple[Any, ...]]] = _once
    warns: bool = False

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.check.__name__

    @property
    def text(self) -> str:
        """What it demands: the first paragraph of its docstring, on one line."""
        return " ".join((self.check.__doc__ or "").partition("\n\n")[0].split())

    def problems(self, config: CheckedConfig | WrittenConfig) -> Iterator[Problem]:
        """The problems of a config without invalid keys."""
        for item in self.each(config):
            yield from self.check(config, *item) or ()


def rule(
    *reads: str,
    stage: Stage = Stage.STATIC,
    applies_to: frozenset[Use] = ANY_USE,
    each: Callable[[Any], Iterable[tuple[Any, ...]]] = _once,
    warns: bool = False,
) -> Callable[[Check], Rule]:
    """Declares a function as a rule; see `Rule`."""
    return lambda check: Rule(check=check, reads=reads, stage=stage, applies_to=applies_to, each=each, warns=warns)


def rules_in(page: ModuleType) -> tuple[Rule, ...]:
    """The rules of a module, in the order in which they are written."""
    return tuple(each for each in vars(page).values() if isinstance(each, Rule))


@dataclass(frozen=True, kw_only=True)
class NotChecked:
    """A rule that could not be checked."""

    rule: Rule
    missing: str
    """The key or the file that it reads, and that is reported as invalid."""
    item: tuple[Any, ...] = ()
    """The item of `rule.each` that it could not be checked for; it starts with a name or a key if there may be several."""

    def __str__(self) -> str:
        name = self.item[0] if self.item else None
        about = f" for {name}" if isinstance(name, str) else f" for {dotted(name)}" if isinstance(name, tuple) else ""
        return f"not checked{about}, because {self.missing} is invalid: {self.rule.text}"


@dataclass(frozen=True, kw_only=True)
class RuleReport:
    """What rules found."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    errors: list[UserError] = field(default_factory=list)
    """The errors that rules raised; each is one of the problems."""

    def run(self, rule: Rule, config: CheckedConfig | WrittenConfig) -> None:
        """Add what a rule finds."""
        items: list[tuple[Any, ...]] = []
        with self._reporting_errors_of(rule):
            items += rule.each(config)
        for item in items:
            with self._reporting_errors_of(rule, item):
                for problem in rule.check(config, *item) or ():
                    (self.warnings if rule.warns else self.problems).append(problem)

    @contextmanager
    def _reporting_errors_of(self, rule: Rule, item: tuple[Any, ...] = ()) -> Iterator[None]:
        try:
            yield
        except UnavailableError as error:
            self.not_checked.append(NotChecked(rule=rule, missing=str(error), item=item))
        except InvalidConfigError as error:
            self.problems.extend(error.problems)
        except UserError as error:
            self.errors.append(error)
            self.problems.append(Problem(tuple(error.key.split(".")) if error.key else (), str(error)))


def run_rules(rules: Iterable[Rule], config: CheckedConfig | WrittenConfig, *stages: Stage) -> RuleReport:
    """Check every rule of some stages that applies to the use of a config, and report all problems together."""
    report = RuleReport()
    for each in rules:
        if each.stage in stages and config.use in each.applies_to:
            report.run(each, config)
    return report


class UnavailableError(RLCoreError):
    """Something that a rule reads is invalid, and reported as such. The message says what."""


class _PartialSection(BaseModel):
    """Base of sections of which only some names can be read."""

    unavailable_names: ClassVar[frozenset[str]] = frozenset()
    section_key: ClassVar[KeyPath] = ()

    def __getattribute__(self, name: str) -> Any:
        if name in type(self).unavailable_names:
            raise UnavailableError(dotted((*type(self).section_key, name)))
        return super().__getattribute__(name)


_CHEAP = {"use_attribute_docstrings": False, "defer_build": True}
"""Settings of models with a single instance. Without them, Pydantic searches all imported modules for the source of each class,
up to 0.1 seconds, and creates a validator also for a section of which nothing can be read."""


def partial_section(
    model: Model, values: Mapping[str, Any], *, path: KeyPath, unknown: Collection[str], is_component: bool = True
) -> BaseModel:
    """An instance of a section's model that raises `UnavailableError` where a key is read whose value is not known.

    Args:
        model: The model.
        values: The values of the section, which may be invalid.
        path: The key of the section.
        unknown: Its keys whose values are not known. If the others are invalid without them, none is.
        is_component: Whether `model` is the model of the section's component. If it is not, because the component was not
            found, what the component would define (methods and properties) cannot be read either.
    """
    is_open = model.model_config.get("extra") == "allow"
    given = {key: value for key, value in values.items() if key not in unknown and (is_open or key in model.model_fields)}
    unavailable = {*unknown, *(() if is_component else _names_of(model))}
    unchecked = [key for key, value in given.items() if _holds_sections(value)]
    if not unavailable and not unchecked:
        return model.model_validate(given)
    try:
        return _partial_model(model, path, unavailable, unchecked=unchecked).model_validate(given)
    except Exception:  # the validation of the section reported it; a validator of a plugin's model may raise anything
        return unavailable_section(model, path)


def unavailable_section(model: Model, path: KeyPath) -> BaseModel:
    """An instance of a section's model of which nothing can be read."""
    return _partial_model(model, path, {*model.model_fields, *_names_of(model)}).model_construct()


def _tolerant(validate: Callable[[Any], Any]) -> Any:
    """A validator of the whole section that demands nothing about keys that are not available."""

    @model_validator(mode="after")
    def check(section: BaseModel) -> BaseModel:
        with suppress(UnavailableError):
            validate(section)
        return section

    return check


def _names_of(model: Model) -> set[str]:
    """What a model defines in addition to its fields and to what every model has."""
    return {name for name in dir(model) if not name.startswith("_") and not hasattr(BaseModel, name)}


def _holds_sections(value: object) -> bool:
    """Whether a value is a section, or several by name; validated again, it would read what is not available."""
    return isinstance(value, BaseModel) or (isinstance(value, dict) and any(isinstance(it, BaseModel) for it in value.values()))


def _partial_model(model: Model, path: KeyPath, unavailable: Collection[str], *, unchecked: Collection[str] = ()) -> Model:
    """A subclass of the model, so that rules recognize it, with fields of any type where nothing is validated."""
    names = (name for name in {*unavailable, *unchecked} if name in model.model_fields)
    fields: dict[str, Any] = dict.fromkeys(names, (Any, None))
    validators = model.__pydantic_decorators__.model_validators.items()
    tolerant = {name: _tolerant(found.func) for name, found in validators if found.info.mode == "after"}
    partial: Model = create_model(
        model.__name__, __base__=(_PartialSection, model), __validators__=tolerant, __cls_kwargs__=_CHEAP, **fields
    )
    partial.unavailable_names, partial.section_key = frozenset(unavailable), path  # type: ignore[attr-defined]
    return partial
