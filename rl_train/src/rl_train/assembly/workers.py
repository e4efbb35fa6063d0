"""Creates the components of a run from their sections: cluster, policy, engine, environments, weight sync, loggers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rl_core.cluster.remote_actor import plain_class
from rl_core.cluster.virtual_cluster import RayVirtualCluster
from rl_core.config.diagnostics import dotted
from rl_core.config.schema import EnvironmentConfig, GenerationConfig, PolicyConfig
from rl_core.config.section import Devices
from rl_core.dispatch.policy import DistributedPolicy
from rl_core.dispatch.worker_facade import WorkerFacade, local_device
from rl_core.errors import ConfigError, with_key
from rl_core.interfaces.environment import EnvironmentInterface, keeps_sessions
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface, WeightTransport
from rl_core.plugins.component import Component, Kind, is_path
from rl_core.plugins.registry import Registry
from rl_core.testing.environments.checks import constructor_config, first_argument
from rl_train.assembly.contracts import capabilities_of, check_capabilities, check_class
from rl_train.assembly.placement import make_cluster, make_engine_cluster, resolve_precision, transports_between
from rl_train.config.rules.rollouts import (
    IN_PROCESS_TRANSPORTS,
    digests_are_held,
    missing_canary,
    uses_canary,
    with_transports_of_plugins,
)
from rl_train.config.schedules import with_schedule_lengths
from rl_train.config.schema import RunConfig
from rl_train.config.slots import COMPANIONS
from rl_train.metrics.logger import Logger
from rl_train.pools.actor_pool import ActorPool
from rl_train.pools.component_probe import check_environment_class
from rl_train.pools.elsewhere import environment_component, environment_elsewhere, worker_elsewhere
from rl_train.pools.pool import InProcessPool
from rl_train.rollouts.environment_pool import EnvironmentPool
from rl_train.user_code import reporting_errors
from rl_train.weight_sync.canary import Canary, CanaryCalibration, TemperatureCorrection, make_canary, rows_of_two_microbatches
from rl_train.weight_sync.device_memory import DeviceMemory
from rl_train.weight_sync.synchronizer import WeightSynchronizer, wait_together


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The components that run in separate processes."""

    policy: ColocatablePolicyInterface
    generation: GenerationInterface | None
    environments: Mapping[str, EnvironmentInterface]
    companions: Mapping[str, DistributedPolicy] = field(default_factory=dict)
    """The companion models, by section."""

    def wait_ready(self) -> None:
        """Wait until every model is loaded, so that loading errors are raised before the first step.

        Raises:
            WorkerError: a rank could not load its model.
            DeadlineExceededError: a rank took longer than `cluster.deadlines.start_s`.
        """
        models: tuple[object, ...] = (self.policy, self.generation, *self.companions.values())
        for model in models:
            if isinstance(model, WorkerFacade):
                model.wait_ready()


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Creates the components of a run; `exits` closes them in reverse order.

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
            run=resolve_precision(run, cluster),
            registry=registry,
            exits=exits,
            cluster=cluster,
            scoring_temperature=run.policy.generation.temperature,
        )

    def start(self, *, samples: bool) -> Workers:
        """Start policy, companion models and, if the run samples, engine and environments, in parallel."""
        if self.uses_gpus:
            return self._start_on_gpus(samples=samples)
        if self.cluster is None:
            return Workers(
                policy=self.policy(),
                generation=self.generation() if samples else None,
                environments=self.environments() if samples else {},
                companions=self.companions(),
            )
        with ThreadPoolExecutor(max_workers=4) as starting:
            policy_starting = starting.submit(self.policy)
            companions_starting = starting.submit(self.companions)
            engine_starting = starting.submit(self.generation) if samples else None
            environments_starting = starting.submit(self.environments) if samples else None
        return Workers(
            policy=policy_starting.result(),
            generation=engine_starting.result() if engine_starting else None,
            environments=environments_starting.result() if environments_starting else {},
            companions=companions_starting.result(),
        )

    @property
    def uses_gpus(self) -> bool:
        """Whether the models run on GPUs, which they share, also with the engine unless it has its own resources."""
        return self.cluster.use_gpus if self.cluster is not None else local_device() == "cuda"

    def _start_on_gpus(self, *, samples: bool) -> Workers:
        policy, generation = self.policy_and_engine() if samples else (self.policy(), None)
        if any(getattr(self.run, name) is not None for name in COMPANIONS):
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

    @property
    def shares_cores(self) -> bool:
        """Whether policy and engine run on CPUs, on some node with more threads together than it has cores."""
        if self.cluster is None or self.engine_cluster is None or self.uses_gpus or self.engine_cluster.use_gpus:
            return False
        threads, cores = Counter[str](), dict[str, float]()
        for cluster in (self.cluster, self.engine_cluster):
            for bundle in cluster.bundles:
                threads[bundle.node.node_id] += cluster.threads_of(bundle)
                cores[bundle.node.node_id] = bundle.node.cpus
        return any(threads[node] > cores[node] for node in threads)

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
        component = self.registry.find("policy", self.run.policy.backend)
        section = self._scoring(with_schedule_lengths(self.run).policy)
        policy: ColocatablePolicyInterface = self._create(component, Kind.POLICY, "policy.backend", config=section)
        self.exits.callback(policy.shutdown)
        return policy

    def companions(self) -> dict[str, DistributedPolicy]:
        """The companion models, by section; they load in the background.

        They score tokens at the policy's temperature.
        """
        companions: dict[str, DistributedPolicy] = {}
        for name in COMPANIONS:
            section = getattr(with_schedule_lengths(self.run), name)
            if section is not None:
                section = self._scoring(section)
                component = self.registry.find("policy", section.backend)
                companions[name] = self._create(component, Kind.POLICY, f"{name}.backend", config=section, name=name)
                self.exits.callback(companions[name].shutdown)
        return companions

    @property
    def _temperature(self) -> float:
        return self.run.scoring_temperature if self.scoring_temperature is None else self.scoring_temperature

    def _scoring(self, section: PolicyConfig) -> PolicyConfig:
        """A model's section with the temperature at which its workers score tokens."""
        generation = self.run.policy.generation
        if generation is None:
            return section
        return section.model_copy(update={"generation": generation.model_copy(update={"temperature": self._temperature})})

    def generation(self) -> GenerationInterface:
        """The engine; it loads in the background."""
        section = self._engine_section
        component = self.registry.find("generation", section.backend)
        generation: GenerationInterface = self._create(
            component,
            Kind.GENERATION,
            "policy.generation.backend",
            config=section.for_policy(self.run.policy),
            cluster=self.engine_cluster,
        )
        self.exits.callback(generation.shutdown)
        return generation

    @property
    def _engine_section(self) -> GenerationConfig:
        section = self.run.policy.generation
        assert section is not None
        on_gpus = self.engine_cluster.use_gpus if self.engine_cluster is not None else self.uses_gpus
        return section.for_devices(Devices(use_gpus=on_gpus, trains=self.trains and self.shares_gpus))

    def _create(self, component: Component, kind: Kind, key: str, **arguments: Any) -> Any:
        """A model or an engine; it loads in the background."""
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
        return created

    def environments(self) -> dict[str, EnvironmentInterface]:
        """Every task's environment, as a pool of processes."""
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

    def weights(
        self,
        policy: ColocatablePolicyInterface,
        generation: GenerationInterface,
        tokenizer: Any = None,
        *,
        memory: DeviceMemory | None = None,
    ) -> WeightSynchronizer:
        """Creates the weight synchronizer, which uses the first transport that both backends support.

        Args:
            policy: the sender.
            generation: the receiver.
            tokenizer: its vocabulary is used for canary prompts; None disables the canary.
            memory: see `WeightSynchronizer`.

        Raises:
            ConfigError: no check would cover the tensors that this engine computes with, or it has its own weights.
        """
        section = self.run.policy.generation
        assert section is not None
        if generation.has_own_weights:
            raise ConfigError(
                f"`policy.generation.backend: {section.backend}`: this engine has its own weights, so it cannot receive the "
                "policy's. Choose another generation backend, or evaluate the engine with `rlcore eval`."
            )
        transports = self._transports(section.refit_transport)
        engine_capabilities = capabilities_of(self.registry.find("generation", section.backend))
        calibration = CanaryCalibration()
        if tokenizer is not None and (problem := missing_canary(section, engine_capabilities)) is not None:
            raise ConfigError(str(problem))  # `rlcore serve` does not import an engine given by its path before
        has_canary = tokenizer is not None and uses_canary(section)
        synchronizer = WeightSynchronizer(
            policy,
            generation,
            transports=transports,
            policy_capabilities=capabilities_of(self.registry.find("policy", self.run.policy.backend)),
            generation_capabilities=engine_capabilities,
            transport=transports[0].name if section.refit_transport is not None else None,
            buffer_bytes=section.refit_buffer_mib * 2**20,
            deadline_s=self.run.cluster.deadlines.refit_s,
            folder=Path(section.refit_folder).expanduser() if section.refit_folder is not None else None,
            canary=(lambda: self._canary(policy, generation, tokenizer, calibration)) if has_canary else None,
            calibration=calibration,
            digests_are_held=digests_are_held(engine_capabilities),
            num_receivers=generation.num_workers,
            wait=wait_together,
            rendezvous=self.cluster.get_master_address_and_port if self.cluster else None,
            memory=memory,
        )
        self.exits.callback(synchronizer.close)
        return synchronizer

    def _canary(
        self,
        policy: ColocatablePolicyInterface,
        generation: GenerationInterface,
        tokenizer: Any,
        calibration: CanaryCalibration,
    ) -> Canary:
        model, section, facts = self.run.policy, self.run.policy.generation, getattr(generation, "facts", {})
        assert section is not None
        sides, exact = self.arithmetic(generation)
        factor = self._temperature / section.temperature
        return make_canary(
            sorted(set(range(min(len(tokenizer), facts.get("vocab_size", len(tokenizer))))) - set(tokenizer.all_special_ids)),
            num_receivers=generation.num_workers,
            max_length=model.max_total_sequence_length,
            exact=exact,
            tolerance=section.canary_tolerance,
            greedy=bool(section.sampling_filters()),
            calibration=calibration,
            sides=sides,
            scored_rows=rows_of_two_microbatches(model) * getattr(policy, "data_ranks", 1),
            temperature_correction=TemperatureCorrection(factor=factor, vocab_size=getattr(policy, "facts", {})["vocab_size"])
            if factor != 1.0
            else None,
        )

    def arithmetic(self, generation: GenerationInterface) -> tuple[str, bool]:
        """The arithmetic of policy and engine in words, and whether both compute in float32."""
        model, section, facts = self.run.policy, self.run.policy.generation, getattr(generation, "facts", {})
        assert section is not None
        engine_precision = facts.get("precision", model.dtype_name)
        sides = (
            f"policy {model.backend} {model.dtype_name}, engine {section.backend} {engine_precision} on "
            f"{facts.get('device', 'an unknown device')}, temperature {section.temperature:g}"
        )
        return sides, {model.dtype_name, engine_precision} == {"float32"}

    def _transports(self, configured: str | None) -> list[type[WeightTransport]]:
        """Transports to try, the cheapest first."""
        if configured is not None:
            names: tuple[str, ...] = (configured,)
        elif self.cluster is None:
            names = IN_PROCESS_TRANSPORTS
        else:
            assert self.engine_cluster is not None
            names = transports_between(self.cluster, self.engine_cluster)
        if configured is None:
            names = with_transports_of_plugins(names, self.registry)
        return [self.registry.find("weight_transport", name).load() for name in names]

    def loggers(self, folder: Path) -> list[Logger]:
        """The enabled loggers of `logger.loggers`, without the two that every run has."""
        loggers: list[Logger] = []
        for name, section in self.run.logger.loggers.items():
            if section.enabled:
                loggers.append(self.registry.find("logger", name).load()(config=section, folder=folder))
                self.exits.callback(loggers[-1].finish)
        return loggers
