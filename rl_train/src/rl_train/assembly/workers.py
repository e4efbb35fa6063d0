"""Starts the components of a run that work in other processes: policy, companion models, engine and environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rl_core.cluster.remote_actor import plain_class
from rl_core.cluster.virtual_cluster import RayVirtualCluster
from rl_core.config.diagnostics import dotted
from rl_core.config.schema import EnvironmentConfig, GenerationConfig, PolicyConfig
from rl_core.config.section import Devices
from rl_core.dispatch.facades import PolicyFacade
from rl_core.dispatch.worker_facade import WorkerFacade, local_device
from rl_core.errors import ConfigError, with_key
from rl_core.interfaces.environment import EnvironmentInterface, keeps_sessions
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.plugins.component import Kind, is_path
from rl_core.plugins.registry import Registry
from rl_core.testing.environments.checks import constructor_config, first_argument
from rl_train.assembly.checks import with_rows_of_policy
from rl_train.assembly.contracts import capabilities_of, check_capabilities, check_class
from rl_train.assembly.placement import make_cluster, make_engine_cluster, resolve_adapters, resolve_precision
from rl_train.config.rules.models import companions_of, shared_models
from rl_train.config.schedules import with_schedule_lengths
from rl_train.config.schema import RunConfig
from rl_train.errors import reporting_errors
from rl_train.pools.actor_pool import ActorPool
from rl_train.pools.component_probe import check_environment_class
from rl_train.pools.elsewhere import environment_component, environment_elsewhere, worker_elsewhere
from rl_train.pools.pool import InProcessPool
from rl_train.rollouts.environment_pool import EnvironmentPool


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The components that run in separate processes."""

    policy: ColocatablePolicyInterface
    generation: GenerationInterface | None = None
    environments: Mapping[str, EnvironmentInterface] = field(default_factory=dict)
    companions: Mapping[str, PolicyFacade] = field(default_factory=dict)
    """The companion models, by section; those of several tasks may be one model."""

    @property
    def companion_models(self) -> tuple[PolicyFacade, ...]:
        """The companion models, each once."""
        return tuple(dict.fromkeys(self.companions.values()))

    def wait_ready(self) -> None:
        """Wait until every model is loaded, so that loading errors are raised before the first step.

        Raises:
            WorkerError: a rank could not load its model.
            DeadlineExceededError: a rank took longer than `cluster.deadlines.start_s`.
        """
        models: tuple[object, ...] = (self.policy, self.generation, *self.companion_models)
        for model in models:
            if isinstance(model, WorkerFacade):
                model.wait_ready()


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Starts the models of a run; `exits` closes them in reverse order.

    Attributes:
        run: the config.
        registry: used to look up components.
        exits: closes every component.
        cluster: where workers run; None in one process.
        scoring_temperature: temperature at which models score tokens; `RunConfig.scoring_temperature` by default.
        trains: whether the run trains, so that the engine leaves its GPUs to the models in between.
    """

    run: RunConfig
    registry: Registry
    exits: ExitStack
    cluster: RayVirtualCluster | None
    scoring_temperature: float | None = None
    trains: bool = False

    @classmethod
    def without_training(cls, run: RunConfig, registry: Registry, exits: ExitStack) -> Builder:
        """A builder with its own cluster, whose models score tokens at the temperature at which the engine samples them."""
        assert run.policy.generation is not None
        cluster = make_cluster(run.cluster, exits)
        return cls(
            run=resolve_adapters(resolve_precision(run, cluster), registry),
            registry=registry,
            exits=exits,
            cluster=cluster,
            scoring_temperature=run.policy.generation.temperature,
        )

    def start(self, *, samples: bool) -> Workers:
        """Start policy, companion models and, if the run samples, engine and environments, in parallel."""
        if self.uses_gpus:
            return self._start_on_gpus(samples=samples)
        starts: dict[str, Callable[[], Any]] = {"policy": self.policy}
        if samples:
            starts |= {"generation": self.generation, "environments": self.environments}
        starts["companions"] = self.companions
        if self.cluster is None:
            return Workers(**{name: start() for name, start in starts.items()})
        with ThreadPoolExecutor(max_workers=4) as starting:
            futures = {name: starting.submit(start) for name, start in starts.items()}
        return Workers(**{name: future.result() for name, future in futures.items()})

    @property
    def uses_gpus(self) -> bool:
        """Whether the models run on GPUs, which they share, also with the engine unless it has its own resources."""
        return self.cluster.use_gpus if self.cluster is not None else local_device() == "cuda"

    def _start_on_gpus(self, *, samples: bool) -> Workers:
        policy, generation = self.policy_and_engine() if samples else (self.policy(), None)
        if companions_of(self.run):
            policy.offload_after_refit()  # a companion needs the same memory to load
        environments, companions = self.environments() if samples else {}, self.companions()
        return Workers(policy=policy, generation=generation, environments=environments, companions=companions)

    def policy_and_engine(self) -> tuple[ColocatablePolicyInterface, GenerationInterface]:
        """Start policy and engine. On shared GPUs the engine starts first and sleeps, because it measures free memory."""
        if not self.shares_gpus:
            return self.policy(), self.generation()
        generation = self.generation()
        generation.finish_generation()
        return self.policy(), generation

    @property
    def shares_gpus(self) -> bool:
        """Whether policy and engine run on the same GPUs."""
        return self.uses_gpus and self.engine_cluster is self.cluster

    @property
    def takes_turns(self) -> bool:
        """Whether policy and engine use the same GPUs one after the other: the engine sleeps while models are trained."""
        return self.shares_gpus and self._engine_section.sleeps

    @cached_property
    def engine_cluster(self) -> RayVirtualCluster | None:
        """Where the engine runs: its own bundles with `policy.generation.resources`, otherwise those of the policy.

        Raises:
            ResourceInsufficientError: there are too few nodes, CPUs or GPUs next to those of the policy.
        """
        if self.cluster is None:
            return None
        return make_engine_cluster(self.run, self.cluster, self.exits)

    def policy(self) -> ColocatablePolicyInterface:
        """The policy; it loads in the background."""
        policy: ColocatablePolicyInterface = self._model("policy.backend", with_schedule_lengths(self.run).policy)
        return policy

    def companions(self) -> dict[str, PolicyFacade]:
        """The companion models, by section; they load in the background. Equal sections share a model.

        They score tokens at the policy's temperature.
        """
        run = with_schedule_lengths(self.run)
        sections, first = companions_of(run), shared_models(companions_of(run))
        models = {
            name: self._model(f"{name}.backend", with_rows_of_policy(sections[name], run, name=name), name=name)
            for name in dict.fromkeys(first.values())
        }
        return {name: models[first[name]] for name in sections}

    @property
    def temperature(self) -> float:
        """Temperature at which models score tokens."""
        return self.run.scoring_temperature if self.scoring_temperature is None else self.scoring_temperature

    def _model(self, key: str, section: PolicyConfig, **arguments: Any) -> Any:
        """A model whose workers score tokens at `temperature`."""
        generation = self.run.policy.generation
        if generation is not None:
            scoring = generation.model_copy(update={"temperature": self.temperature})
            section = section.model_copy(update={"generation": scoring})
        return self._create(Kind.POLICY, key, section.backend, config=section, **arguments)

    def generation(self) -> GenerationInterface:
        """The engine; it loads in the background."""
        section = self._engine_section
        generation: GenerationInterface = self._create(
            Kind.GENERATION,
            "policy.generation.backend",
            section.backend,
            config=section.for_policy(self.run.policy),
            cluster=self.engine_cluster,
        )
        return generation

    @property
    def _engine_section(self) -> GenerationConfig:
        section = self.run.policy.generation
        assert section is not None
        on_gpus = self.engine_cluster.use_gpus if self.engine_cluster is not None else self.uses_gpus
        return section.for_devices(Devices(use_gpus=on_gpus, trains=self.trains and self.shares_gpus))

    def environments(self) -> dict[str, EnvironmentInterface]:
        """Every task's environment, as a pool of processes, or in this process without a cluster."""
        return {task: self._environment(task, section) for task, section in self.run.env.items()}

    def _environment(self, task: str, section: EnvironmentConfig) -> EnvironmentInterface:
        component = environment_component(task, section, self.registry)
        elsewhere = environment_elsewhere(task, section, self.registry)
        worker_class: Any
        if elsewhere is not None:
            worker_class, kwargs = worker_elsewhere(component, elsewhere, section)
            has_sessions, reads_tokens = elsewhere.keeps_sessions, elsewhere.reads_token_ids
        else:
            worker_class = component.load()
            with with_key(dotted(("env", task, "env_cls" if section.env_cls is not None else "name"))):
                check_environment_class(worker_class, component.name)
            kwargs = first_argument(worker_class, constructor_config(section))
            plain = plain_class(worker_class)
            has_sessions, reads_tokens = keeps_sessions(plain), getattr(plain, "reads_token_ids", False)
        if self.cluster is None:
            pool: Any = InProcessPool(worker_class, kwargs, max_concurrency=section.max_concurrency, name=f"env.{task}")
        else:
            pool = ActorPool(
                self.cluster,
                worker_class,
                section.num_workers,
                kwargs,
                deadline_s=min(self.run.cluster.deadlines.environment_s, section.step_timeout_s),
                max_concurrency=section.max_concurrency,
                python=section.python if elsewhere is not None else None,
                name=f"env.{task}",
            )
        environment = EnvironmentPool(pool, task_name=task, keeps_sessions=has_sessions, reads_token_ids=reads_tokens)
        self.exits.callback(environment.shutdown)
        return environment

    def _create(self, kind: Kind, key: str, backend: str, **arguments: Any) -> Any:
        """A model or an engine; it loads in the background until `exits` closes it."""
        component = self.registry.find(kind, backend)
        arguments = {"cluster": self.cluster, "deadlines": self.run.cluster.deadlines, **arguments}
        target = component.load()
        with with_key(key):
            check_class(target, kind, arguments)
            user_code = reporting_errors(f"{component.name}(...)", target) if is_path(component.name) else nullcontext()
            with user_code:
                created = target(**arguments)
            try:
                check_class(type(created), kind)
                check_capabilities(created, kind, capabilities_of(component))
            except ConfigError:
                created.shutdown()
                raise
        self.exits.callback(created.shutdown)
        return created
