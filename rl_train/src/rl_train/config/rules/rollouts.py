"""Rules about rollouts.

The engine: what it samples from, how it receives the weights of the policy, and what verifies that it computes with them (the
digests of its tensors, and the canary). Environments and agents: turns, segments, tool calls and scored rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from rl_core.config.diagnostics import KeyPath, Problem, show
from rl_core.config.schema import EnvironmentConfig, GenerationConfig, PolicyConfig
from rl_core.errors import PluginError
from rl_core.plugins.component import Capability, Kind, capability_problem, did_you_mean, is_path
from rl_core.plugins.import_path import missing_target
from rl_core.plugins.registry import Registry
from rl_train.config.rules.models import each_engine, lacks_capability
from rl_train.config.rules.rule import CONFIG_FILE, TRAIN_ONLY, TRAINING, CheckedConfig, Stage, Use, rule
from rl_train.config.schema import RunConfig, uses_canary
from rl_train.config.slots import static_attribute

IN_PROCESS_TRANSPORTS = ("by_reference", "shared_memory")
"""Transports that are tried in one process if `refit_transport` is not set, the cheapest first."""
_BUILT_IN_TRANSPORTS = (*IN_PROCESS_TRANSPORTS, "collective", "disk")
_GENERATION = ("policy", "generation")


def default_transports(num_nodes: int, *, on_gpus: bool | None, is_colocated: bool = True) -> tuple[str, ...]:
    """Transports that are tried between processes if `refit_transport` is not set, the cheapest first.

    Shared memory of the host reaches the engine on one node. Shared memory of GPUs reaches it on any number of nodes, but only
    if each of its processes computes on a GPU of the policy.

    Args:
        num_nodes: number of nodes of policy and engine.
        on_gpus: whether they compute on GPUs; None if that is only known when the cluster starts.
        is_colocated: whether policy and engine share their GPUs.
    """
    shares_memory = is_colocated if on_gpus else num_nodes == 1 or (on_gpus is None and is_colocated)
    return ("shared_memory", "collective") if shares_memory else ("collective",)


def with_transports_of_plugins(names: tuple[str, ...], registry: Registry) -> tuple[str, ...]:
    """The transports `names`, then the transports of other plugins by name, which are tried after ours."""
    return (*names, *(name for name in registry.names(Kind.WEIGHT_TRANSPORT) if name not in _BUILT_IN_TRANSPORTS))


@rule("policy.generation", each=each_engine)
def engine_samples_with_min_p(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """The engine supports `min_p`, if it is set."""
    error = lacks_capability(config.registry, Kind.GENERATION, generation.backend, Capability.SAMPLED_SETS)
    if generation.min_p and error is not None:
        yield Problem((*_GENERATION, "min_p"), f"{generation.min_p} is not supported by policy.generation. {error}")


@rule("algorithm", "policy.generation", "policy.backend", applies_to=TRAINING, each=each_engine)
def filtered_samples_are_scored_among_the_kept_tokens(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """With top-p, top-k or min-p, the engine returns the tokens that it kept, and the policy normalizes over them."""
    reason = _why_not_scored(config, generation) if config.run.needs_sampled_sets else None
    for key, neutral in generation.sampling_filters().items() if reason is not None else ():
        yield Problem(
            (*_GENERATION, *key),
            f"{config.run.algorithm_name} cannot train on filtered samples here: {reason} Set it to {show(neutral)}; "
            "temperature is accounted for.",
        )


def _why_not_scored(config: CheckedConfig, generation: GenerationConfig) -> str | None:
    """Why the policy would score tokens under another distribution than they are sampled from; None if it does not."""
    run = config.run
    if run.algorithm.runtime_needs.has_teacher:
        return "it compares the whole distributions of policy and teacher."
    for kind, backend, capability, does in (
        (Kind.GENERATION, generation.backend, Capability.SAMPLED_SETS, "return the tokens that it sampled from"),
        (Kind.POLICY, run.policy.backend, Capability.SCORES_SAMPLED_SETS, "normalize over the tokens that were sampled from"),
    ):
        if (reason := lacks_capability(config.registry, kind, backend, capability)) is not None:
            return f"the {kind.label} {backend!r} does not {does}, so every probability ratio would be wrong. {reason}"
    return None


@rule("algorithm", "policy.generation", applies_to=TRAINING, each=each_engine)
def samples_are_from_unchanged_logits(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """The engine does not change logits, because the policy scores tokens without the change."""
    for key, neutral in generation.logit_changes().items() if config.run.algorithm.needs_generation else ():
        yield Problem(
            (*_GENERATION, *key),
            f"{config.run.algorithm_name} cannot train on samples from changed logits: the policy scores tokens without the "
            f"change, so every probability ratio would be wrong. Set it to {show(neutral)}.",
        )


def declares_own_weights(section: GenerationConfig, registry: Registry | None = None) -> bool:
    """Whether the engine of a section has its own weights.

    Args:
        section: `policy.generation`.
        registry: Used to import the class of an engine given by its path, whose `has_own_weights` may be inherited. Without
            it, only a value written in the class body is found.
    """
    if section.has_own_weights or not is_path(section.backend):
        return section.has_own_weights
    if registry is None:
        return static_attribute(section.backend, "has_own_weights") is True
    return getattr(registry.find("generation", section.backend).load(), "has_own_weights", False) is True


def own_weights_refused(algorithm: str, engine: str, key: str | None = None) -> str:
    """Why an algorithm that samples from the policy cannot use this engine; `key` as `GenerationConfig.weights_key`."""
    other = "hoose an engine that receives the policy's weights"
    remedy = f"C{other}" if key is None else f"Set policy.generation.{key}, so that it receives them, or c{other}"
    return (
        f"the engine {engine!r} has its own weights, which are never those of the policy, so {algorithm} would train on "
        f"samples of another model. {remedy}; this one can be used by `rlcore eval`."
    )


@rule("algorithm", "policy.generation", applies_to=TRAINING, each=each_engine)
def engine_samples_from_the_policy(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """A run that trains on samples does not use an engine with its own weights, as far as its source file says so."""
    yield from _own_weights(config, generation, None)


@rule("algorithm", "policy.generation", applies_to=TRAIN_ONLY, stage=Stage.IMPORTED, each=each_engine)
def imported_engine_samples_from_the_policy(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """A run that trains on samples does not use an engine whose class has its own weights."""
    config.load(Kind.GENERATION, generation.backend)
    yield from _own_weights(config, generation, config.registry)


def _own_weights(config: CheckedConfig, section: GenerationConfig, registry: Registry | None) -> Iterator[Problem]:
    run = config.run
    if run.algorithm.runtime_needs.samples and declares_own_weights(section, registry):
        yield Problem((*_GENERATION, "backend"), own_weights_refused(run.algorithm_name, section.backend, section.weights_key))


@rule("algorithm", "policy.generation", each=each_engine)
def synced_weights_are_verified(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """The canary is only disabled or impossible for an engine whose digests cover the tensors that it computes with."""
    if generation.backend in config.registry.names(Kind.GENERATION) and not generation.has_own_weights:
        yield from unverified_weights(
            config, generation, config.registry.find(Kind.GENERATION, generation.backend).capabilities
        )


def unverified_weights(config: CheckedConfig, generation: GenerationConfig, capabilities: Collection[str]) -> Iterator[Problem]:
    """The problem of an engine with these capabilities that requires the canary, in a config without it."""
    # Changed logits are refused by another rule in training, and only measured in a comparison.
    trains = config.use in TRAINING and config.run.algorithm.needs_generation
    problem = missing_canary(generation, capabilities)
    if problem is not None and not (generation.refit_canary and (trains or config.use is Use.COMPARE)):
        yield problem


@rule(
    "policy.generation.refit_transport", "policy.generation.backend", "policy.backend", applies_to=CONFIG_FILE, each=each_engine
)
def weight_transport_is_supported(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """The configured weight transport exists, and both backends support it."""
    transport, at = generation.refit_transport, (*_GENERATION, "refit_transport")
    if transport is None:
        return
    try:
        required = _transport_requirements(config.registry, [transport])
    except PluginError as error:
        yield Problem(at, str(error))
        return
    needed = required[transport]
    if isinstance(needed, tuple) and (problem := capability_problem(needed)) is not None:
        yield Problem(at, f"the weight transport {transport!r} `requires` {', '.join(map(repr, needed))}, but {problem}")
        return
    for kind, backend in ((Kind.POLICY, config.run.policy.backend), (Kind.GENERATION, generation.backend)):
        capabilities = _capabilities(config.registry, kind, backend)
        if capabilities is not None and transport not in _transports_with(capabilities, required):
            names = config.registry.names(Kind.WEIGHT_TRANSPORT)
            known = ", ".join(_transports_with(capabilities, _transport_requirements(config.registry, names)))
            yield Problem(at, f"the {kind.label} {backend!r} does not support {transport!r}. It supports: {known or 'none'}.")


@rule("policy.generation.backend", "policy.backend", "cluster", applies_to=CONFIG_FILE, each=each_engine)
def backends_have_a_common_transport(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """Both backends support one of the weight transports that are tried by default."""
    run, registry = config.run, config.registry
    if generation.refit_transport is not None or generation.has_own_weights:
        return
    if run.cluster.backend == "in_process":
        tried: tuple[str, ...] = IN_PROCESS_TRANSPORTS
    else:
        own = generation.resources
        nodes = run.cluster.num_nodes if own is None else max(run.cluster.num_nodes, own.num_nodes)
        tried = default_transports(nodes, on_gpus=run.cluster.use_gpus, is_colocated=own is None)
    tried = with_transports_of_plugins(tried, registry)
    policy = _capabilities(registry, Kind.POLICY, run.policy.backend)
    engine = _capabilities(registry, Kind.GENERATION, generation.backend)
    if policy is None or engine is None:
        return
    required = _transport_requirements(registry, registry.names(Kind.WEIGHT_TRANSPORT))
    of_policy, of_engine = (_transports_with(capabilities, required) for capabilities in (policy, engine))
    if {*tried} & {*of_policy} & {*of_engine}:
        return
    shared = [name for name in of_policy if name in of_engine]
    where = "in one process" if run.cluster.backend == "in_process" else f"on {run.cluster.num_nodes} node(s)"
    yield Problem(
        (*_GENERATION, "backend"),
        f"the engine {generation.backend!r} cannot receive the weights of the policy backend {run.policy.backend!r} {where}: "
        f"tried {', '.join(tried)}; the policy backend supports {', '.join(of_policy) or 'none'}, the engine "
        f"{', '.join(of_engine) or 'none'}. "
        + (
            f"Set refit_transport to {' or '.join(shared)}, or change a backend."
            if shared
            else "Choose another generation backend or policy backend."
        ),
    )


def _transport_requirements(registry: Registry, names: Iterable[str]) -> dict[str, object]:
    """The capabilities that each weight transport requires of a backend, read from the source of its class."""
    return {name: static_attribute(registry.find(Kind.WEIGHT_TRANSPORT, name).target, "requires") for name in names}


def _transports_with(capabilities: Collection[str], required: Mapping[str, object]) -> list[str]:
    """The transports whose requirements a backend with these capabilities has."""
    return [name for name, needed in required.items() if not isinstance(needed, tuple) or {*needed} <= {*capabilities}]


def _capabilities(registry: Registry, kind: Kind, backend: str) -> tuple[str, ...] | None:
    """Capabilities of a registered backend; None for a backend given by its path, because they are only known after import."""
    return None if is_path(backend) else registry.find(kind, backend).capabilities


@rule(
    "policy.generation.resources",
    "policy.generation.num_workers",
    "cluster.backend",
    applies_to=CONFIG_FILE,
    each=each_engine,
)
def resources_of_the_engine_determine_its_replicas(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """An engine with its own resources has one replica for each of their workers, in separate processes."""
    if generation.resources is None:
        return
    if config.run.cluster.backend == "in_process":
        yield Problem(
            (*_GENERATION, "resources"),
            "is not supported with cluster.backend: in_process, which runs policy and engine in this process. Remove it, or "
            "set cluster.backend: ray.",
        )
    if generation.num_workers is not None:
        yield Problem(
            (*_GENERATION, "num_workers"),
            "is determined by policy.generation.resources (num_nodes times workers_per_node, divided by the processes of a "
            "replica). Remove it.",
        )


@rule(
    "policy.generation.resources",
    "policy.generation.refit_transport",
    "cluster.use_gpus",
    applies_to=CONFIG_FILE,
    each=each_engine,
)
def shared_gpu_memory_needs_shared_gpus(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """Weights are only sent through the memory of GPUs to an engine on the same GPUs."""
    if generation.resources is None or generation.refit_transport != "shared_memory":
        return
    if config.run.cluster.use_gpus or generation.resources.use_gpus:
        yield Problem(
            (*_GENERATION, "refit_transport"),
            "shared_memory needs policy and engine on the same GPUs, but policy.generation.resources gives the engine its own. "
            "Remove refit_transport, so that weights are sent by collective.",
        )


@rule(
    "policy.generation.refit_transport",
    "policy.generation.refit_folder",
    "cluster.num_nodes",
    applies_to=CONFIG_FILE,
    each=each_engine,
)
def refit_folder_is_for_the_disk_transport(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """A folder for weights is set if several nodes exchange them by disk, and only with that transport."""
    at, nodes = (*_GENERATION, "refit_folder"), config.run.cluster.num_nodes
    transport, folder = generation.refit_transport, generation.refit_folder
    if transport == "disk" and folder is None and (nodes > 1 or generation.resources is not None):
        where = (
            f"on {nodes} nodes" if nodes > 1 else "and policy.generation.resources, because the engine may be on another node"
        )
        yield Problem(
            at, f"is required with refit_transport: disk {where}. Set a folder that all nodes can access.", is_missing=True
        )
    if transport != "disk" and folder is not None:
        yield Problem(
            at,
            f"is only used with refit_transport: disk, but refit_transport is {transport or 'not set'}. Remove refit_folder, "
            "or set refit_transport: disk.",
        )


def why_merged(policy: PolicyConfig, generation: GenerationConfig, capabilities: Collection[str]) -> str | None:
    """Why the adapters of a policy must be merged for an engine with these capabilities; None if they can be sent."""
    if Capability.LORA_ADAPTERS not in capabilities:
        return f"the engine {generation.backend!r} does not compute with adapters"
    return policy.adapter_problem or generation.adapter_problem(policy)


@rule("policy.generation.lora", "policy", "policy.generation.backend", applies_to=CONFIG_FILE, each=each_engine)
def adapters_are_sent_to_engines_that_support_them(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """How adapters are sent is only set for a policy that trains some, and only to what the engine supports."""
    policy, at = config.run.policy, (*_GENERATION, "lora")
    if generation.lora is None:
        return
    if policy.lora_rank is None:
        yield Problem(at, f"{generation.lora} has no effect, because this policy trains no adapters. Remove it.")
        return
    capabilities = _capabilities(config.registry, Kind.GENERATION, generation.backend)
    if generation.lora == "merged" or capabilities is None:
        return
    if (reason := why_merged(policy, generation, capabilities)) is not None:
        yield Problem(at, f"adapter cannot be used: {reason}. Set it to merged.")


OWN_PARSER = "response_template"
"""Name of the tokenizer's own parser of responses."""
PARSER_NAMES = (OWN_PARSER, "hermes", "mistral", "llama3")
_HISTORY: KeyPath = ("rollout", "history")


def each_task(config: CheckedConfig) -> Iterator[tuple[str, EnvironmentConfig]]:
    """The environments of a config, for rules that check each of them."""
    yield from config.run.env.items()


@rule("env", "algorithm", each=each_task)
def rollouts_have_enough_turns(config: CheckedConfig, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """A rollout may have the turns without which its environment gives no reward, if the class states them literally."""
    stated = None if section.env_cls is None or section.python is not None else static_attribute(section.env_cls, "min_turns")
    yield from too_few_turns(config.run, task, stated if isinstance(stated, int) else section.min_turns)


@rule("env", "algorithm", each=each_task, stage=Stage.IMPORTED)
def rollouts_have_enough_turns_for_the_class(config: CheckedConfig, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """A rollout may have the turns without which its environment gives no reward, also if they are inherited or computed."""
    if section.python is not None:
        return  # `environment_classes_keep_their_contract` asks its interpreter
    environment_class = config.load(Kind.ENVIRONMENT, section.env_cls or section.name or task)
    yield from too_few_turns(config.run, task, max(section.min_turns, getattr(environment_class, "min_turns", 1)))


def too_few_turns(run: RunConfig, task: str, needed: int) -> Iterator[Problem]:
    """The key that limits the turns of a task below what its environment needs."""
    allowed, section = run.max_turns[task], run.env[task]
    if allowed >= needed:
        return
    own = ("env", task, "max_rollout_turns")
    asked = run.algorithm.runtime_needs.max_turns
    if section.max_rollout_turns is not None or asked is None:
        path: tuple[str, ...] = own if section.max_rollout_turns is not None else ("env", task)
    else:
        path = (run.algorithm_name, "max_rollout_turns")
    yield Problem(
        path,
        f"rollouts of task {task!r} have at most {allowed} {'turn' if allowed == 1 else 'turns'}, but environment "
        f"{section.env_cls or section.name or task} needs {needed} to give a reward. Set {'.'.join(own)} to {needed} or more.",
    )


@rule("rollout.history", "env", "algorithm", applies_to=TRAINING)
def history_is_only_rendered_again_for_later_turns(config: CheckedConfig) -> Iterator[Problem]:
    """`rollout.history: template` is only set if rollouts have several turns."""
    run = config.run
    is_single = max(run.max_turns.values(), default=1) == 1
    if run.algorithm.runtime_needs.rollouts is not None and run.rollout.history == "template" and is_single:
        yield Problem(_HISTORY, "rollouts have one turn, so no history is rendered again and the key has no effect: remove it.")


@rule("rollout.history", "env", "algorithm", applies_to=TRAINING)
def algorithm_supports_segments(config: CheckedConfig) -> Iterator[Problem]:
    """The algorithm supports rollouts with several segments, if the config has any."""
    run = config.run
    source, rollouts = _source_of_segments(run), run.algorithm.runtime_needs.rollouts
    if source is not None and rollouts is not None and not rollouts.accepts_segments:
        key, setting = source
        prompt = run.algorithm.runtime_needs.teacher_prompt
        yield Problem(
            key,
            f"{setting} can divide a rollout into several segments, which {run.algorithm_name} does not support: it computes "
            "advantages from the sequence of a rollout's tokens. Use grpo, or remove the key."
            if prompt is None
            else f"{setting} can divide a rollout into several segments, but the teacher reads one prompt ({prompt.key}) for a "
            "whole rollout. Remove one of the two keys.",
        )


@rule("rollout.history", "env", "algorithm", "loss_fn", applies_to=TRAINING)
def loss_supports_segments(config: CheckedConfig) -> Iterator[Problem]:
    """The loss does not count sequences, if rollouts can have several segments."""
    run = config.run
    source, counted = _source_of_segments(run), run.loss_fn.sequence_level_key
    if source is not None and counted is not None and run.algorithm.runtime_needs.rollouts is not None:
        yield Problem(
            ("loss_fn", counted),
            f"{source[1]} can divide a rollout into several segments, and this loss would count each of them as a rollout. Use "
            "a mean over tokens, as in clipped_pg, dapo and cispo with their defaults.",
        )


def _source_of_segments(run: RunConfig) -> tuple[KeyPath, str] | None:
    """The key that can divide rollouts into several segments, and what it is."""
    if run.rollout.history == "template":
        return _HISTORY, "rollout.history: template"
    task = next((task for task, section in run.env.items() if section.agent is not None), None)
    return None if task is None else (("env", task, "agent"), "an agent")


@rule("rollout.min_scored", "algorithm", applies_to=TRAINING)
def groups_have_the_scored_rows(config: CheckedConfig) -> Iterator[Problem]:
    """The minimum number of scored rows is not larger than a group."""
    rollouts, needed = config.run.algorithm.runtime_needs.rollouts, config.run.rollout.min_scored
    if needed is not None and rollouts is not None and needed > rollouts.samples_per_prompt:
        yield Problem(
            ("rollout", "min_scored"),
            f"{needed} scored rows are more than the {rollouts.samples_per_prompt} samples of a group, so every group would be "
            f"replaced. Set it to {rollouts.samples_per_prompt} or less.",
        )


@rule("env", each=each_task)
def agent_can_be_imported(config: CheckedConfig, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """The agent of a task is a function that exists, and a plugin provides the endpoint that it samples from."""
    path, key = section.agent, ("env", task, "agent")
    if path is None:
        return
    if not is_path(path):
        yield Problem(key, f"{path!r} is not the dotted path of a function: write it in full, such as my_agent.{path}.")
    elif section.python is None and (problem := missing_target(path)) is not None:
        yield Problem(key, f"cannot import {path!r}: {problem}")
    elif not config.registry.names(Kind.MODEL_SERVER):
        yield Problem(key, "agents need a local endpoint, which rl-serve provides: install it (docs/installation.md).")


@rule("env", "cluster.backend", each=each_task)
def another_interpreter_needs_ray(config: CheckedConfig, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """`env.<task>.python` is only set if workers are separate processes."""
    if section.python is not None and config.run.cluster.backend == "in_process":
        yield Problem(("env", task, "python"), "workers with their own interpreter need `cluster.backend: ray`.")


@rule("env", each=each_task)
def tool_parser_exists(config: CheckedConfig, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """The parser of tool calls of a task is a built-in one or a class that exists."""
    name, key = section.tool_parser, ("env", task, "tool_parser")
    if name is None or name in PARSER_NAMES:
        return
    if not is_path(name):
        hint = did_you_mean(name, [*PARSER_NAMES])
        names = ", ".join(PARSER_NAMES)
        yield Problem(key, f"unknown parser {name!r}.{hint} Use {names}, or the dotted path of a class.")
    elif (problem := missing_target(name)) is not None:
        yield Problem(key, f"{name} cannot be imported: {problem}")


def digests_are_held(capabilities: Collection[str]) -> bool:
    """Whether the fingerprint of an engine with these capabilities covers the tensors that it computes with."""
    return Capability.HELD_WEIGHT_DIGESTS in capabilities


def missing_canary(generation: GenerationConfig, capabilities: Collection[str]) -> Problem | None:
    """The problem of a section without the canary if nothing else covers the tensors that the engine computes with, or None."""
    if digests_are_held(capabilities) or uses_canary(generation):
        return None
    key = ("refit_canary",) if not generation.refit_canary else next(iter(generation.logit_changes()))
    return Problem(
        ("policy", "generation", *key),
        f"the engine {generation.backend!r} requires the canary: its fingerprint covers the weights that it received, not the "
        f"tensors that it computes with (it does not have the capability {str(Capability.HELD_WEIGHT_DIGESTS)!r}). Keep "
        "refit_canary: true, and do not change logits.",
    )
