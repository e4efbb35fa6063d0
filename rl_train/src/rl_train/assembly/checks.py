"""Checks of models that need their files but no weights, and of reward functions with the first row of the data."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from rl_core.config.diagnostics import KeyPath, Problem, dotted
from rl_core.config.policy_sections import PolicyConfig
from rl_core.config.schema import EnvironmentConfig
from rl_core.config.section import Section
from rl_core.data.loaded_model import Head, check_files, weights_file
from rl_core.data.tokenizer import find_tokenizer, load_tokenizer
from rl_core.errors import ConfigError, PluginError, RLCoreError, UserError, with_key
from rl_core.event_loop import finished
from rl_core.interfaces.generation import GenerationInterface
from rl_core.plugins.component import Capability, Kind, did_you_mean, is_path
from rl_core.plugins.registry import Registry
from rl_train.assembly.data import Source
from rl_train.config.rules.models import companions_of, model_path, models_of, role_of
from rl_train.config.schema import RunConfig
from rl_train.data.conversations import without_answer
from rl_train.data.holdout import row_location
from rl_train.data.images import image_settings
from rl_train.data.processors import engine_tokenizer
from rl_train.data.unknown_tokens import WITHOUT_ROWS
from rl_train.diagnostics.model_files import position_limit, read_model_config, read_model_files
from rl_train.pools.pool import running_loop
from rl_train.rewards.config import FunctionEnvironmentConfig
from rl_train.rewards.environment import load_functions, row_of
from rl_train.rewards.functions import RewardFunction, RewardFunctionError

_log = logging.getLogger("rlcore")
_TRIED_ROWS = 16
"""Number of rows that are tried if no function gives a reward for the first one."""


def refuse_backends_without_images(config: RunConfig, registry: Registry, *, trains: bool) -> None:
    """Check that the backends of a run whose rows have images can use them.

    Args:
        config: the run.
        registry: used to look up backends.
        trains: whether models are trained or score rows; otherwise, only the engine reads them.

    Raises:
        ConfigError: one of them cannot.
    """
    used: list[tuple[KeyPath, Kind, str]] = [
        (model_path(name), Kind.POLICY, model.backend) for name, model in models_of(config).items() if trains
    ]
    if config.policy.generation is not None and (config.algorithm.runtime_needs.samples or not trains):
        used.append((("policy", "generation"), Kind.GENERATION, config.policy.generation.backend))
        if (problem := config.policy.generation.image_problem(config.policy)) is not None:
            raise ConfigError(
                f"Rows of the data have images, which policy.generation cannot use: {problem}. Use `backend: hf`, or leave the "
                "images out with `images_key: null` in the section of the dataset, and remove images from messages.",
                key="policy.generation.backend",
            )
    for key, kind, backend in used:
        if not is_path(backend) and backend not in registry.names(kind):  # created in Python
            continue
        with with_key(f"{dotted(key)}.backend"):
            try:
                registry.find(kind, backend, requires=(Capability.IMAGES,))
            except PluginError as error:
                raise ConfigError(
                    f"Rows of the data have images, which {dotted(key)} cannot use. {error} To leave the images out, set "
                    "`images_key: null` in the section of the dataset, and remove images from messages."
                ) from error


def refuse_other_image_processors(config: RunConfig, tokenizer: Any) -> None:
    """Check that companion models make the same of a picture as the policy, because they receive its tensors.

    Raises:
        ConfigError: a companion has another image processor.
    """
    others = {name: model.model_name for name, model in companions_of(config).items()}
    for name, model in others.items():
        if model != config.policy.model_name and image_settings(model, tokenizer) != image_settings(
            config.policy.model_name, tokenizer
        ):
            raise ConfigError(
                f"{name}.model_name: rows have images, and the image processor of {model} has other settings than that of the "
                f"policy {config.policy.model_name}, whose tensors it would receive. Use a model with the same processor.",
                key=f"{name}.model_name",
            )


def refuse_other_tokenizers(config: RunConfig, tokenizer: Any) -> None:
    """Check that companion models use the policy's tokenizer, because they receive its token ids.

    Raises:
        ConfigError: a companion's tokenizer has other tokens or ids.
    """
    for name, section in companions_of(config).items():
        if section.model_name == config.policy.model_name or not _reads_token_ids(config, name):
            continue
        with with_key(f"{name}.{tokenizer_key(section)}"):
            own = load_tokenizer(section.tokenizer.name or section.model_name, model_name=section.model_name).get_vocab()
        others = sorted(set(tokenizer.get_vocab().items()) ^ set(own.items()))
        if others:
            raise ConfigError(
                f"{name}.model_name: the tokenizer of {section.model_name} differs from that of the policy "
                f"{config.policy.model_name} in {len(others)} tokens, for example {others[0][0]!r}, so the policy's token "
                "ids would mean other words. Use a model with the policy's tokenizer."
            )


def _reads_token_ids(config: RunConfig, name: str) -> bool:
    """Whether a model receives the policy's token ids; a teacher with its own tokenizer receives text."""
    prompt = config.algorithm.runtime_needs.teacher_prompt
    return name != "teacher" or prompt is None or not prompt.own_tokens


def refuse_other_end_tokens(config: RunConfig) -> None:
    """Check that `policy.generation.eos_token_id`, if it is set, is an end-of-sequence token of the engine's model.

    Raises:
        ConfigError: the model has others.
    """
    given, policy = config.policy.generation, config.policy
    if given is None or given.eos_token_id is None or given.has_own_weights:
        return
    engine = given.for_policy(policy)
    trusted = _loading_options(engine).get("trust_remote_code", False)
    model = engine.model_name or policy.model_name
    tokenizer = find_tokenizer(model, engine_tokenizer(engine) or policy.tokenizer, trust_remote_code=trusted)
    read_model_files(model, tokenizer, trust_remote_code=trusted, eos_token_id=given.eos_token_id)


def tokens_without_rows(config: RunConfig, tokenizer: Any) -> tuple[str, int, dict[int, str]]:
    """The model of the run whose embedding has the fewest rows, their number, and the tokens without one, by id."""
    models = [model for name, model in models_of(config).items() if _reads_token_ids(config, name)]
    sizes = [(size, model.model_name) for model in models if (size := embedding_rows(model)) is not None]
    rows, name = min(sizes, key=lambda size: size[0], default=(sys.maxsize, ""))
    return name, rows, {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}


def embedding_rows(model: PolicyConfig) -> int | None:
    """Number of rows of a model's embedding and LM head; None if its files do not tell."""
    options = _loading_options(model)
    found = read_model_config(model.model_name, trust_remote_code=options.get("trust_remote_code", False))
    own = getattr(found.get_text_config(decoder=True), "vocab_size", None) if found is not None else None
    size: int | None = options.get("config_overrides", {}).get("vocab_size", own)
    return size


def with_rows_of_policy(model: PolicyConfig, config: RunConfig, *, name: str) -> PolicyConfig:
    """The section of a model; that of a teacher with the policy's tokenizer without the rows that the policy does not have."""
    if role_of(name) != "teacher" or not _reads_token_ids(config, name):
        return model
    theirs, ours = embedding_rows(model), embedding_rows(config.policy)
    if model.vocab_size is not None or theirs is None or ours is None or theirs <= ours:
        return model
    _log.info(
        "the LM head of `%s` has %d rows, and the policy's %d: its log-probabilities are normalized over the first %d",
        name,
        theirs,
        ours,
        ours,
    )
    return model.model_copy(update={"vocab_size": ours})


def tokenizer_problems(config: RunConfig, tokenizer: Any) -> Iterator[Problem]:
    """Tokens that every run uses and that have no row in the embedding."""
    model, rows, missing = tokens_without_rows(config, tokenizer)
    for name in ("bos", "eos", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number in missing:
            yield Problem(
                _tokenizer_path(config),
                f"the {name.upper()} token {missing[number]!r} has id {number}, which has no row in the embedding of "
                f"{model} ({rows} rows). {WITHOUT_ROWS}",
            )


def tokenizer_warnings(config: RunConfig, tokenizer: Any) -> Iterator[Problem]:
    """Other tokens that have no row in the embedding: an error only for rows that contain them."""
    model, rows, missing = tokens_without_rows(config, tokenizer)
    if missing:
        first = ", ".join(f"{missing[number]!r} ({number})" for number in sorted(missing)[:3])
        yield Problem(
            _tokenizer_path(config),
            f"{len(missing)} of {len(tokenizer)} tokens have no row in the embedding of {model} ({rows} rows), such as {first}."
            f" Rows of the data that contain one are refused. {WITHOUT_ROWS}",
        )


def _tokenizer_path(config: RunConfig) -> KeyPath:
    return ("policy", *tokenizer_key(config.policy).split("."))


def tensor_problems(config: RunConfig) -> Iterator[Problem]:
    """Local models of which the files lack tensors, or have others than their config describes; reads only headers."""
    engine = config.policy.generation
    models: list[tuple[KeyPath, Any]] = [
        ((*model_path(name), "model_name"), model) for name, model in models_of(config).items()
    ]
    if engine is not None and engine.model_name is not None:
        models.append((("policy", "generation", "model_name"), engine))
    checked = set()
    for path, section in models:
        head: Head = section.head if isinstance(section, PolicyConfig) else "tokens"
        fields = _loading_options(section).get("config_overrides", {})
        if weights_file(section.model_name) is None or (key := (section.model_name, head, str(fields))) in checked:
            continue
        checked.add(key)
        try:
            known = read_model_config(section.model_name) if fields else None
            if not all(hasattr(known, field) for field in fields):
                continue  # what loads the model names the key
            check_files(section.model_name, head=head, **fields)
        except UserError as error:
            yield Problem(path, str(error))
        except (OSError, ValueError) as error:  # a shard is missing, or Transformers does not support the config
            yield Problem(path, f"Transformers cannot read {section.model_name}: {error}")


def tokenizer_key(section: PolicyConfig) -> str:
    """The key of a model's section that names its tokenizer."""
    return "tokenizer.name" if section.tokenizer.name else "model_name"


def length_problems(config: RunConfig, *, is_rotary: bool) -> Iterator[Problem]:
    """Lengths above the number of positions of a model.

    Args:
        config: the run.
        is_rotary: whether to look at models with rotary embeddings, which can also be computed for positions that the model
            was not trained for, or at the others.
    """
    for path, tokens, model, section in _lengths(config):
        limit = position_limit(model, **_loading_options(section))
        if limit is None or tokens <= limit.tokens or limit.is_rotary != is_rotary:
            continue
        above = f"{tokens} tokens are more than the {limit.tokens} positions (`max_position_embeddings`)"
        yield Problem(
            path,
            f"{above} that {model} was trained for. Longer rows are scored by extrapolation, usually badly, and engines may "
            f"end or refuse them. Lower it to {limit.tokens}, or scale the rotary embeddings (`rope_parameters` of the "
            "model's config)."
            if is_rotary
            else f"{above} of {model}, which has no rotary embeddings to compute further ones. Lower it to {limit.tokens} or "
            "less, or use another model.",
        )


def warn_about_engine_limit(config: RunConfig, generation: GenerationInterface | None) -> None:
    """Warn if an engine that is ready ends rows before the length that the config sets."""
    section = config.policy.generation
    limit = getattr(generation, "facts", {}).get("max_model_len")
    if section is None or limit is None:
        return
    wanted = min([config.policy.max_total_sequence_length, *(length for _, length in _own_lengths(section))])
    if limit < wanted:
        _log.warning(
            "the engine ends rows at %d tokens, before policy.max_total_sequence_length (%d): completions that reach its limit "
            "are truncated. Lower the length to %d, or use a model or server with a higher limit.",
            limit,
            config.policy.max_total_sequence_length,
            limit,
        )


def _lengths(config: RunConfig) -> Iterator[tuple[KeyPath, int, str, Section]]:
    """The configured lengths: the key, the length, the name of the model, and the section that loads it."""
    generation = config.policy.generation
    for name, model in models_of(config).items():
        yield (*model_path(name), "max_total_sequence_length"), model.max_total_sequence_length, model.model_name, model
    if generation is not None and not generation.has_own_weights:
        loaded_as = config.policy if generation.model_name is None else generation
        for path, length in _own_lengths(generation):
            yield ("policy", "generation", *path), length, generation.model_name or config.policy.model_name, loaded_as


def _loading_options(section: Section) -> dict[str, Any]:
    """The options of a backend that change how a model's config is read."""
    keys = ("config_overrides", "trust_remote_code")
    return {key: getattr(own, key) for _, own in _backend_sections(section) for key in keys if hasattr(own, key)}


def _own_lengths(section: Section) -> Iterator[tuple[KeyPath, int]]:
    """The `max_model_len` that the section of an engine sets, in itself or in its section `<backend>_cfg`."""
    for path, own in (((), section), *(((key,), own) for key, own in _backend_sections(section))):
        length = getattr(own, "max_model_len", None)
        if isinstance(length, int):
            yield (*path, "max_model_len"), length


def _backend_sections(section: Section) -> Iterator[tuple[str, Any]]:
    """The sections `<backend>_cfg` within a section."""
    return ((key, getattr(section, key)) for key in type(section).model_fields if key.endswith("_cfg"))


def with_completion_formats(config: RunConfig, sources: Sequence[Source]) -> RunConfig:
    """The config with `completion_format: auto` replaced by the format that fits the data of each task.

    Args:
        config: the run.
        sources: the training and the validation data.
    """
    env = {task: _with_format(section, sources_of(task, sources, tasks=config.env)) for task, section in config.env.items()}
    return config.model_copy(update={"env": env})


def check_reward_functions(task: str, config: RunConfig, sources: Sequence[Source]) -> None:
    """Try every reward function of a task with the first row of its data.

    Each function is tried with two completions: the expected answer, if the row has one, and an empty text.

    Args:
        task: the task.
        config: the run.
        sources: the training and the validation data.

    Raises:
        ConfigError: a function does not exist, requires a field that the row does not have, raised, or returned something that
            is not a reward, or a weight has the name of no reward.
    """
    found = [*sources_of(task, sources, tasks=config.env)]
    section = _with_format(config.env[task], found)
    if isinstance(section, FunctionEnvironmentConfig):
        with with_key(f"env.{task}"):
            functions = _loaded(section, task)
            if found:
                _try_all(functions, section, task, found[0])


def _with_format(section: EnvironmentConfig, sources: Iterable[Source]) -> EnvironmentConfig:
    if not isinstance(section, FunctionEnvironmentConfig) or section.completion_format != "auto":
        return section
    as_messages = any(is_conversational(source.records) for source in islice(sources, 1))
    return section.model_copy(update={"completion_format": "messages" if as_messages else "text"})


def try_functions(functions: Sequence[RewardFunction], source: Source, *, as_messages: bool) -> set[str]:
    """Call each function with the first row of the data; returns the names of the rewards.

    Raises:
        ConfigError: see `check_reward_functions`.
    """
    return {name for function in functions for name in _try(function, source, as_messages=as_messages)}


def check_weights(weights: Mapping[str, float], names: set[str]) -> None:
    """Check that every weight has the name of a reward.

    Raises:
        ConfigError: a weight has the name of no reward.
    """
    for name in weights:
        if name not in names:
            raise ConfigError(
                f"`reward_weights` has the name {name!r}, but the rewards are {', '.join(sorted(names))}."
                f"{did_you_mean(name, sorted(names))}"
            )


def is_conversational(records: Any) -> bool:
    """Whether the prompts of a dataset are lists of messages, and not texts."""
    prompts = getattr(records, "prompt_of", None)
    return prompts is not None and len(records) > 0 and isinstance(prompts(0), list)


def _loaded(section: FunctionEnvironmentConfig, task: str) -> list[RewardFunction]:
    try:
        return load_functions(section)
    except ConfigError as error:
        error.key = f"env.{task}.{error.key}"
        raise


def _try_all(functions: Sequence[RewardFunction], section: FunctionEnvironmentConfig, task: str, source: Source) -> None:
    names: set[str] = set()
    as_messages = section.completion_format == "messages"
    for function in functions:
        with with_key(".".join(["env", task, *map(str, section.key_of(function.name))])):
            names |= _try(function, source, as_messages=as_messages)
    others = range(1, min(_TRIED_ROWS, len(source.records)))
    if not names and not any(
        _try(function, source, as_messages=as_messages, row=row) for row in others for function in functions
    ):
        with with_key(".".join(["env", task, *map(str, section.key_of(functions[0].name))])):
            raise ConfigError(
                f"{' and '.join(function.name for function in functions)} returned None for the expected answers of the first "
                f"{1 + len(others)} rows and for an empty completion, so nothing would be scored. A function without `return` "
                "returns None: return a number."
            )
    names |= set(section.reward_names)
    with with_key(f"env.{task}.reward_weights"):
        check_weights(section.reward_weights, names)


def _try(function: RewardFunction, source: Source, *, as_messages: bool, row: int = 0) -> set[str]:
    record = source.records[row]
    info = record.get("extra_env_info")
    expected = info.get("expected_answer") if isinstance(info, Mapping) else None
    texts = ["" if expected is None else str(expected), ""]
    prompt = without_answer(record["messages"])
    rows = [row_of([*prompt, {"role": "assistant", "content": text}], info) for text in texts]
    try:
        if function.is_async or running_loop() is not None:  # in a notebook, a loop runs in this thread
            score = function.score_async if function.is_async else function.score
            with ThreadPoolExecutor(1) as thread:
                scores = thread.submit(lambda: finished(score(rows, as_messages=as_messages))).result()
        else:
            scores = function.score(rows, as_messages=as_messages)
    except ConfigError:
        raise
    except (RLCoreError, RewardFunctionError) as error:
        formats = " `completions` were lists of messages" if as_messages else " `completions` were texts"
        other = "text" if as_messages else "messages"
        hint = f"{formats}; `completion_format: {other}` changes that." if function.is_batched else ""
        location = row_location(source.records, row)
        raise ConfigError(f"{str(error).rstrip('.')}. It was called with {location} of the data.{hint}") from error
    return {name for rewards in scores for name in rewards or ()}


def sources_of(task: str, sources: Iterable[Source], *, tasks: Collection[str]) -> Iterator[Source]:
    """The datasets whose first record is of a task; a mixture is several datasets."""
    for source in (member for each in sources for member in each.datasets):
        if not len(source.records) or "messages" not in source.records[0]:
            continue
        named = source.task_name or source.records[0].get("task_name")
        if named == task or (named not in tasks and len(tasks) == 1):
            yield source
