"""Starts the engine that is served: a model's own, or a run's with the weights of a checkpoint."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml

from rl_core.config.diagnostics import Problems, SourceLocation, dotted, node_from_plain
from rl_core.config.policy_sections import PolicyTokenizerConfig
from rl_core.config.schema import EnvironmentConfig, PolicyConfig
from rl_core.config.validator import section_of_values
from rl_core.data.hub import require_model
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.plugins.component import Component, Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_serve.settings import ServedImages
from rl_train.config.data_sections import PromptConfig
from rl_train.config.loader import load_config
from rl_train.config.rules.rule import Use
from rl_train.config.values import apply_overrides
from rl_train.data.images import ImageReader
from rl_train.data.processors import load_policy_tokenizer
from rl_train.diagnostics.model_files import position_limit
from rl_train.metrics.progress import reported_start
from rl_train.run_folders.checkpoint_paths import find_weights
from rl_train.run_folders.run_folder import CONFIG
from rl_train.run_folders.run_names import similar_runs

_UNLIMITED = 2**31 - 1
_CONVERSATION = 2048
"""Tokens of a conversation with a run, if its model has as many positions and the run's own rows are shorter."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A started engine and what the server must know about it."""

    name: str
    """Name of the model in the API."""
    generation: GenerationInterface
    """The engine."""
    tokenizer: Any
    """Its tokenizer."""
    temperature: float
    """The engine's temperature; greedy decoding is available as well."""
    top_p: float
    """The engine's top-p."""
    top_k: int | None = None
    """The engine's top-k; None for no limit."""
    reads_sampling: bool = False
    """Whether requests may have another temperature, top-p and top-k than the engine."""
    row_options: Collection[str] = ()
    """Further options that the engine reads of each row."""
    max_new_tokens: int
    """Number of new tokens per completion if a request sets no limit."""
    max_model_len: int | None
    """Maximum number of tokens of prompt and completion; None if the engine does not report it."""
    vocab_size: int
    """Number of token ids that the engine accepts."""
    backend: str
    """Name of its generation backend."""
    capabilities: Collection[str] = ()
    """What the backend declares that it can do."""
    reads_images: bool = False
    """Whether messages may have images. The `image_reader` of the tokenizer reads them, or says why there can be none."""
    max_images: int = 0
    """Largest number of images in the messages of a request."""
    tasks: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    """The environments of a run, by task."""
    prompts: Sequence[PromptConfig] = ()
    """How the training data of a run becomes messages: a prompt for each way; empty for messages as they are."""

    @property
    def described_prompts(self) -> str:
        """The keys of each of `prompts`, for messages."""
        given = ({key: value for key, value in prompt.model_dump().items() if value is not None} for prompt in self.prompts)
        return "; or ".join(", ".join(f"{key} {value!r}" for key, value in keys.items()) or "none" for keys in given)

    @cached_property
    def max_prompt_chars(self) -> int | None:
        """Characters of a prompt of `max_model_len` tokens that are all as long as the longest one; None without that limit."""
        if self.max_model_len is None:
            return None
        return self.max_model_len * max(map(len, self.tokenizer.get_vocab()))


@contextmanager
def started_model(
    target: str,
    *,
    backend: str | None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    best: bool = False,
    images: ServedImages | None = None,
) -> Iterator[ServedModel]:
    """Start the engine of a model or run, and report at intervals how long that takes; it is shut down after the block.

    Args:
        target: a model's name or folder, or a run folder or step folder.
        backend: generation plugin for a model; by default the only one that is installed. A run has its own.
        overrides: `key=value`; for a model, only keys of `policy.generation` and `policy.tokenizer` are allowed.
        name: name of the model in the API; by default the last component of `target`.
        best: for a run folder, use its best checkpoint instead of the newest.
        images: limits of images in messages.

    Raises:
        ConfigError: there is no such model or run, several backends are installed, or a setting is wrong.
        WeightSyncError: the engine did not receive the weights of the checkpoint.
    """
    registry = Registry(discover())
    images = images or ServedImages()
    label = name or (Path(target).resolve().name if Path(target).exists() else target)
    start: Callable[[], ServedModel]
    with ExitStack() as exits:
        if is_run(Path(target)):
            if backend is not None:
                raise ConfigError(
                    f"--backend {backend}: {target} is a run, which has its own engine. To change it, add the override "
                    f"policy.generation.backend={backend}."
                )
            start = partial(_of_run, Path(target), registry, overrides, label, exits, best=best, images=images)
        else:
            if best:
                raise ConfigError(f"--best chooses among the checkpoints of a run, but {target} is a model. Remove --best.")
            try:
                require_model(target)
            except DataError as error:
                raise DataError(f"{error}.{similar_runs(target)}") from error
            start = partial(_of_model, target, registry, backend, overrides, label, exits, images=images)
        with _stopped_in_one_line(label), reported_start(f"loading {label}:", _report):
            model = start()
        yield model


@contextmanager
def _stopped_in_one_line(label: str) -> Iterator[None]:
    """Report an interruption in one line, without warnings about workers that cannot shut down while they load."""
    try:
        yield
    except KeyboardInterrupt:
        _report(f"stopped while loading {label}")
        logging.disable(logging.WARNING)
        raise


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # standard output may be redirected for the answers


def is_run(path: Path) -> bool:
    """Whether a path is a run folder or a step folder, not a model."""
    return path.is_dir() and ((path / CONFIG).is_file() or (path / "manifest.json").is_file())


def _of_model(
    target: str,
    registry: Registry,
    backend: str | None,
    overrides: Sequence[str],
    label: str,
    exits: ExitStack,
    *,
    images: ServedImages,
) -> ServedModel:
    component = registry.find("generation", backend or _only_backend(registry))
    model = component.load_config()
    if model is None:
        raise ConfigError(f"The generation backend {component.name!r} has no config section, so it cannot be served by name.")
    given = _values_of(overrides)
    values = {"backend": component.name, "model_name": target, **given.get("generation", {})}
    section: Any = section_of_values(model, values, name="policy.generation", who="rlcore serve")
    named = section_of_values(PolicyTokenizerConfig, given.get("tokenizer", {}), name="policy.tokenizer", who="rlcore serve")
    tokenizer = load_policy_tokenizer(PolicyConfig(backend=component.name, model_name=target, tokenizer=named))
    section = _with_tokenizer(section, named)
    generation: GenerationInterface = component.load()(config=_without_limit(section), cluster=None, deadlines=None)
    exits.callback(generation.shutdown)
    return _served(label, generation, section, tokenizer, component, target, images)


def _with_tokenizer(section: Any, tokenizer: PolicyTokenizerConfig) -> Any:
    """The section of an engine, which reads stop strings with this tokenizer unless it has another."""
    key = next((name for name in type(section).model_fields if name.endswith("_cfg")), None)
    own = section if key is None else section[key]
    if "tokenizer" not in own or own.tokenizer is not None:
        return section
    own = own.model_copy(update={"tokenizer": tokenizer})
    return own if key is None else section.model_copy(update={key: own})


def _of_run(
    path: Path,
    registry: Registry,
    overrides: Sequence[str],
    label: str,
    exits: ExitStack,
    *,
    best: bool,
    images: ServedImages,
) -> ServedModel:
    from rl_train.assembly.weights import make_weights  # imports Ray, which a model does not need
    from rl_train.assembly.workers import Builder

    given = find_weights(path, best=best)
    folder = given.run_folder if given.run_folder is not None else path
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{given.path} was moved out of its run, so its config is not known. Serve the run folder, or convert the "
            f"checkpoint (rlcore convert) and serve the model."
        )
    changes = [*_engine_overrides(folder / CONFIG, registry), *overrides]
    run = load_config(folder / CONFIG, changes, registry=registry, use=Use.SERVE).run
    section = run.policy.generation
    assert section is not None  # a rule for configs that are served
    policy_section = given.policy_to_load(run.policy).model_copy(update={"generation": _without_limit(section)})
    tokenizer = load_policy_tokenizer(policy_section)
    builder = Builder.without_training(run.model_copy(update={"policy": policy_section}), registry, exits)
    policy, generation = builder.policy_and_engine()
    policy.load_checkpoint(given.weights)
    # The policy stays alive: an engine that replaces a dead worker needs its weights again.
    make_weights(builder, policy, generation, tokenizer).sync()
    component = registry.find("generation", section.backend)
    model, prompts = run.policy.model_name, run.data.training_prompts()
    kwargs = images.processor_kwargs or run.data.images.processor_kwargs
    images = images.model_copy(update={"processor_kwargs": kwargs})
    return _served(label, generation, section, tokenizer, component, model, images, tasks=run.env, prompts=prompts)


def _engine_overrides(config: Path, registry: Registry) -> list[str]:
    """Overrides that allow conversations longer than the run's own rows, and give an engine to one without, such as SFT.

    Those of the user come after them, and may replace them.
    """
    policy = yaml.safe_load(config.read_text(encoding="utf-8"))["policy"]
    own_engine = policy.get("generation")
    if own_engine is not None and own_engine["backend"] != policy["backend"]:
        return []  # an engine such as vLLM reserves memory by this length
    backend = policy["backend"] if policy["backend"] in registry.names(Kind.GENERATION) else _only_backend(registry)
    limit = position_limit(policy["model_name"])
    length = max(policy["max_total_sequence_length"], min(limit.tokens, _CONVERSATION) if limit is not None else 0)
    longer = f"policy.max_total_sequence_length={length}"
    if own_engine is not None:
        return [longer]
    return [longer, f"++policy.generation.backend={backend}", f"++policy.generation.max_new_tokens={length // 2}"]


def _without_limit(section: Any) -> Any:
    """The section of an engine whose completions are only limited by requests and the length of the model."""
    return section.model_copy(update={"max_new_tokens": _UNLIMITED})


def _served(
    label: str,
    generation: GenerationInterface,
    section: Any,
    tokenizer: Any,
    component: Component,
    model: str,
    images: ServedImages,
    *,
    tasks: Mapping[str, EnvironmentConfig] | None = None,
    prompts: Sequence[PromptConfig] = (),
) -> ServedModel:
    facts = getattr(generation, "facts", {})
    reads_images = facts.get("images", False)

    def check() -> None:
        if not reads_images:
            of_model = f"{label} is a model of text"
            of_backend = f"the generation backend {section.backend!r} does not have the capability `images`"
            reason = of_model if "images" in facts else of_backend
            raise ConfigError(f"Messages cannot have images, because {reason}.")

    tokenizer.image_reader = ImageReader(model, images, check)
    return ServedModel(
        name=label,
        generation=generation,
        tokenizer=tokenizer,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        reads_sampling=facts.get("reads_sampling", False),
        row_options=facts.get("row_options", ()),
        max_new_tokens=section.max_new_tokens,
        max_model_len=facts.get("max_model_len"),
        vocab_size=facts.get("vocab_size", len(tokenizer)),
        backend=section.backend,
        capabilities=component.capabilities or getattr(component.load(), "capabilities", ()),
        reads_images=reads_images,
        max_images=images.max_images,
        tasks=tasks or {},
        prompts=prompts,
    )


def _only_backend(registry: Registry) -> str:
    names = sorted(component.name for component in registry.all("generation"))
    if len(names) != 1:
        found = f"several are installed: {', '.join(names)}" if names else "none is installed"
        raise ConfigError(f"--backend is required, because it selects the generation plugin and {found}.")
    return names[0]


def _values_of(overrides: Sequence[str]) -> Mapping[str, Any]:
    if not overrides:
        return {}
    problems = Problems()
    root, _ = apply_overrides(node_from_plain({}, location=SourceLocation(source="rlcore serve")), overrides, problems=problems)
    problems.raise_if_any()
    for path, node in root.leaves():
        if path[:2] not in (("policy", "generation"), ("policy", "tokenizer")) or len(path) < 3:
            allowed = "policy.generation and policy.tokenizer"
            raise ConfigError(f"{node.location}: a model has no {dotted(path)}. Only keys of {allowed} can be set.")
    values: Mapping[str, Any] = root.plain()["policy"]
    return values
