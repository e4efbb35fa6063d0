"""What rules of a later stage read in addition to the sections: loss, models, tokenizer and data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from rl_core.config.diagnostics import KeyPath, dotted
from rl_core.config.schema import PolicyConfig
from rl_core.data.hub import require_model
from rl_core.errors import DataError, UserError
from rl_core.interfaces.policy import LossFunction
from rl_core.plugins.component import Kind
from rl_train.assembly.checks import tokenizer_key
from rl_train.assembly.parts import loss_of
from rl_train.assembly.preparation import DataLoaders, Preparation, RunData
from rl_train.config.loader import LocatedConfig
from rl_train.config.rules.models import model_path, models_of
from rl_train.config.rules.rollouts import declares_own_weights
from rl_train.config.rules.rule import CheckedConfig, UnavailableError, Use
from rl_train.config.schema import RunConfig

_Fact = TypeVar("_Fact")


@dataclass(frozen=True, kw_only=True)
class RunFacts(CheckedConfig):
    """A config, and what it refers to. No worker is started, and no weights are loaded.

    If something cannot be loaded, the rule that reads it first reports the error, and the rules that read it later are not
    checked.

    Attributes:
        prepared: Tokenizer, tools and data, each loaded when it is first read.
        located: The config with its source locations; None if the sections do not come from a file.
        reported: Keys with a problem that an earlier stage reported.
    """

    prepared: Preparation
    located: LocatedConfig | None = None
    reported: frozenset[KeyPath] = frozenset()
    _failed: set[str] = field(default_factory=set, init=False, repr=False)
    _missing: dict[str, str | None] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        config: CheckedConfig,
        *,
        located: LocatedConfig | None = None,
        prepared: Preparation | None = None,
        reported: Iterable[KeyPath] = (),
    ) -> RunFacts:
        """The facts of a config, loaded when they are first read: those of a training run, unless `prepared` is given."""
        return cls(
            run=config.run,
            registry=config.registry,
            use=config.use,
            layout=config.layout,
            prepared=prepared or Preparation(config.run, config.registry),
            located=located,
            reported=frozenset(reported),
        )

    @cached_property
    def loss_fn(self) -> LossFunction:
        """The loss."""
        return self._load("the loss", lambda: loss_of(self.run, self.registry))

    @cached_property
    def starts_policy(self) -> bool:
        """Whether the policy is started. An engine with its own weights is evaluated without it."""
        engine = self.run.policy.generation
        if self.use is not Use.EVAL or engine is None:
            return True
        self.load(Kind.GENERATION, engine.backend)
        return not declares_own_weights(engine, self.registry)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the policy."""
        self.require_model("policy", self.run.policy)
        return self._load("the tokenizer", lambda: self.prepared.tokenizer)

    @property
    def data(self) -> RunData:
        """The datasets."""
        self.require_unreported(*(("data", *key.split("."), "path") for key in self.run.data.sections()))
        return self._load("the data", lambda: self.prepared.data)

    @property
    def loaders(self) -> DataLoaders:
        """The data as batches of token ids."""
        _ = self.tokenizer, self.data
        return self._load("a row of the data", lambda: self.prepared.loaders)

    @property
    def in_steps(self) -> RunConfig:
        """The config with epochs converted to steps."""
        _ = self.loaders
        return self.prepared.config_in_steps

    def missing_source(self, source: str) -> str | None:
        """Why there is no such model or tokenizer; None if there is."""
        if source not in self._missing:
            self._missing[source] = None
            try:
                require_model(source)
            except DataError as error:
                self._missing[source] = f"{error}."
        return self._missing[source]

    def require_unreported(self, *keys: KeyPath) -> None:
        """Stop a rule that reads files whose problem an earlier stage reported.

        Raises:
            UnavailableError: One of the keys has a problem.
        """
        for key in self.reported.intersection(keys):
            raise UnavailableError(dotted(key))

    def require_model(self, section: str, model: PolicyConfig) -> None:
        """Stop a rule that needs the files of a model that does not exist, which another rule reports.

        The models of a Python trainer are objects, and need no files.

        Raises:
            UnavailableError: It does not exist.
        """
        self.require_unreported((*model_path(section), "model_name"))
        if self.use is not Use.PYTHON and self.missing_source(model.tokenizer.name or model.model_name) is not None:
            raise UnavailableError(f"{section}.{tokenizer_key(model)}")

    def require_models(self) -> None:
        """As `require_model`, for all models.

        Raises:
            UnavailableError: One of them does not exist.
        """
        for name, model in models_of(self.run).items():
            self.require_model(name, model)

    def _load(self, name: str, load: Callable[[], _Fact]) -> _Fact:
        if name in self._failed:
            raise UnavailableError(name)
        try:
            return load()
        except UserError:
            self._failed.add(name)
            raise
