"""The config that `rlcore init` writes: its values and comments, and how it is fitted to GPUs.

For GPUs, candidates of layout, LoRA or full training, microbatches, engine and transport are planned one after the other, the
fastest first, and the first that fits is taken. Nothing is stored per model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from rl_core.errors import ConfigError
from rl_train.files import format_size
from rlcore_cli.arguments import counted
from rlcore_cli.starter.data_file import PAIRS, RowFormat
from rlcore_cli.starter.reward_files import reward_function

if TYPE_CHECKING:
    from rl_core.plugins.registry import Registry
    from rl_train.plan.planner import MemoryPlan

REASONING_TOKENS = 256
"""Room in a completion for reasoning before the answer, in tokens."""
_ROUNDED_TO = 16
_SMALL_PARAMETERS = 1_000_000_000
_HELD_OUT_ROWS = 200
FEWEST_ROWS = 40
"""Data with fewer rows is not split: a validation of a few rows would be noise."""
_MATHEMATICS = re.compile(r"[-+]?[\d.,/%$ ]*\d[\d.,/%$ ]*|.*[\\^].*", re.DOTALL)
_FINAL_ANSWER = 'End with a line that consists of "Answer: " and the answer only.'
COMMENTS = {
    "grpo.num_prompts_per_step": "prompts per step",
    "grpo.num_generations_per_prompt": "completions per prompt, compared with each other",
    "grpo.overlong_filtering": "a truncated completion may end in a number that is not its answer",
    "sft.global_batch_size": "conversations per step",
    "dpo.global_batch_size": "pairs per step",
    "rm.global_batch_size": "pairs per step",
    "kto.global_batch_size": "answers per step",
    "policy.backend": "Transformers; `rlcore list-backends` shows the others",
    "policy.model_name": "a model folder, a GGUF file, or a name on the hub",
    "policy.max_total_sequence_length": "tokens of the longest row, prompt and completion together",
    "policy.optimizer.kwargs.lr": "1e-5 for models below a billion parameters, 1e-6 above",
    "policy.generation.backend": "`vllm` is faster on GPUs",
    "data.split.validation": "chance of each row to be held out and never trained on",
    "data.prompt.prompt_config": "asks for the answer in \\boxed{}, which `math` reads",
    "data.prompt.system_prompt": "the form in which the reward reads the answer",
    "env.math.require_box": "no prompt asks for \\boxed{}",
    "checkpointing.save_period": "steps between checkpoints; a stopped run continues from the last one",
    "checkpointing.metric_name": "the checkpoint that is best by it is kept, too; `--best` of other commands selects it",
    "logger.run_name": "name of the folder in `runs`",
}
"""Comment of each key; a key that the config does not have has no effect."""


@dataclass(frozen=True, kw_only=True)
class Starter:
    """What the user gave, and what was found in the data and the model's files."""

    algorithm: str
    model: str
    form: RowFormat
    train: Mapping[str, Any]
    """Source of the training data: `dataset_name` and `path`."""
    validation: Mapping[str, Any] | None
    """Source of the validation data; None to hold out a share of the training data."""
    rows: int
    """Number of training rows."""
    grader: str | None
    """Environment that grades the answers, if the algorithm samples; None for a reward function."""
    has_template: bool
    """Whether the model's tokenizer has a chat template, which system messages need."""
    is_small: bool
    """Whether the model has less than a billion parameters."""
    longest_row: int
    """Number of tokens of the longest prompt, conversation or answer."""
    next_longest_row: int = 0
    """Number of tokens of the second longest."""
    longest_answer: int = 0
    """Number of tokens of the longest answer, with its worked solution if the data has it; 0 without answers."""
    longest_location: str = ""
    """Location of that row; empty if it was not measured."""
    empty_answers: tuple[int, str] = (0, "")
    """Number of measured rows whose answer is empty, and the location of the first."""
    unwritable_answers: tuple[int, str] = (0, "")
    """Number of measured rows whose answer has text that the tokenizer cannot represent, and the location of the first."""
    positions: int | None
    """Most tokens that the model reads; None if unknown."""
    run_name: str
    """Name of the run."""
    reads_requests: bool = True
    """Whether the tokenizer has tokens for a prompt that asks for the answer in a format."""
    tokenizer: str | None = None
    """Tokenizer to use instead of the model's."""
    chat_template: str | None = None
    """File of the chat template to use instead of the model's."""
    skips_bad_rows: bool = False
    """Whether bad rows are skipped."""
    has_text_prompts: bool = True
    """Whether prompts are texts and not messages, so that a prompt config can contain them."""
    prompts_ask_for_box: bool = False
    """Whether the prompts of the data ask for the answer in \\boxed{}."""
    has_system_messages: bool = False
    """Whether conversations of the data begin with a system message, which one of the config would not replace."""

    @property
    def samples(self) -> bool:
        """Whether the algorithm samples completions and scores them."""
        return self.algorithm == "grpo"

    @property
    def math(self) -> bool:
        """Whether the environment `math` grades the answers."""
        return self.grader == "math"

    @property
    def task(self) -> str:
        """Name of the environment's section."""
        return self.grader or "task"

    @property
    def asks_for_format(self) -> bool:
        """Whether the config may add a prompt that asks for the answer in a format."""
        return self.reads_requests and not self.has_system_messages and not self.prompts_ask_for_box

    @property
    def requires_box(self) -> bool:
        """Whether `math` reads only what is in a box, which a prompt asks for."""
        return self.asks_for_format or self.prompts_ask_for_box

    @property
    def may_reason(self) -> bool:
        """Whether completions may reason before the answer: a prompt requests it or the model chats, and it has words."""
        return self.reads_requests and (self.has_template or self.math)

    @property
    def validates(self) -> bool:
        """Whether there is validation data: a separate file, or enough rows to hold some out."""
        return self.validation is not None or self.rows >= FEWEST_ROWS


def are_mathematical(answers: Sequence[Any]) -> bool:
    """Whether all answers are numbers or LaTeX, which the environment `math` compares by value."""
    return bool(answers) and all(_MATHEMATICS.fullmatch(str(answer).strip()) for answer in answers)


def has_few_parameters(config: Any) -> bool:
    """Whether a model's config describes less than a billion parameters; False without a config.

    Counts 12 h^2 per layer (attention and a feed-forward network of ratio 4) and the embeddings, for hidden size h.
    """
    if config is None:
        return False
    text = config.get_text_config(decoder=True)
    hidden, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    if not isinstance(hidden, int) or not isinstance(layers, int):
        return False
    parameters: int = 12 * hidden * hidden * layers + text.vocab_size * hidden
    return parameters < _SMALL_PARAMETERS


def comments(starter: Starter) -> dict[str, str]:
    """Comment of each key; a key that the config does not have has no effect."""
    wanted, answer = _wanted_tokens(starter), f"2 x the longest answer ({counted(starter.longest_answer, 'token')})"
    if not starter.longest_answer:
        chosen = "a default, because the data has no answers"
    elif starter.may_reason:
        chosen = f"{REASONING_TOKENS} for reasoning + {answer}; lower it if the model answers at once"
    else:
        chosen = f"{answer}, because no prompt asks to reason"
    if starter.samples and _new_tokens(starter) < wanted:
        chosen = f"all that the model's {starter.positions} positions leave, less than {wanted}: {chosen}"
    return COMMENTS | {"policy.generation.max_new_tokens": f"longer completions are cut off; {chosen}"}


def _wanted_tokens(starter: Starter) -> int:
    """Room for a completion: twice the longest answer, which a model may write in more tokens, and reasoning before it."""
    answer = _rounded_up(2 * starter.longest_answer)
    return answer + REASONING_TOKENS if starter.may_reason or not answer else answer


def _new_tokens(starter: Starter) -> int:
    wanted = _wanted_tokens(starter)
    return wanted if starter.positions is None else min(wanted, starter.positions - starter.longest_row - 1)


def config_values(starter: Starter) -> dict[str, Any]:
    """The sections of the config.

    Raises:
        ConfigError: The longest prompt leaves no room for a completion.
    """
    values: dict[str, Any] = {starter.algorithm: _algorithm(starter), "policy": _policy(starter), "data": _data(starter)}
    if starter.samples:
        section: dict[str, Any] = {"require_box": False} if starter.math and not starter.requires_box else {}
        if starter.grader is None:
            section["reward_fn"] = reward_function(has_answers=starter.form.answer_key is not None)
            section |= {} if starter.form.answer_key is None else {"correct_above": 0.5}
        values["env"] = {starter.task: section}
    best: dict[str, Any] = {}
    if starter.validates:
        best = (
            {"metric_name": "validation/reward"}
            if starter.samples
            else {"metric_name": "validation/loss", "higher_is_better": False}
        )
        best["keep_top_k"] = 1
    values["checkpointing"] = {"save_period": 20, **best, "keep_latest_k": 1}
    return {**values, "logger": {"run_name": starter.run_name}}


def _algorithm(starter: Starter) -> dict[str, Any]:
    size = min(16 if starter.algorithm in ("sft", "kto") else 8, _training_rows(starter))
    steps: dict[str, Any] = {"max_num_steps": 100}
    steps |= {"num_prompts_per_step": size, "num_generations_per_prompt": 8} if starter.samples else {"global_batch_size": size}
    if starter.samples and starter.math and not starter.requires_box:
        steps["overlong_filtering"] = True
    if starter.validates:
        steps |= {"val_period": 20, "val_at_start": True, "val_at_end": True, "max_val_samples": 64}
    return steps


def _training_rows(starter: Starter) -> int:
    held_out = _held_out(starter.rows) if starter.validation is None else 0.0
    # The split is drawn by a hash, so it may hold out somewhat more than its share.
    return max(1, int(starter.rows * (1 - 2 * held_out)))


def _held_out(rows: int) -> float:
    if rows < FEWEST_ROWS:
        return 0.0
    return 0.25 if rows < 100 else max(0.0001, round(min(0.1, _HELD_OUT_ROWS / rows), 4))


def _policy(starter: Starter) -> dict[str, Any]:
    policy: dict[str, Any] = {"backend": "hf", "model_name": starter.model}
    given = {"name": starter.tokenizer, "chat_template": starter.chat_template}
    if tokenizer := {key: value for key, value in given.items() if value is not None}:
        policy["tokenizer"] = tokenizer
    limit, new_tokens = _rounded_up(starter.longest_row), 0
    if starter.samples:
        new_tokens = _new_tokens(starter)
        if new_tokens < 1:
            raise ConfigError(
                f"{starter.longest_location} has {starter.longest_row} tokens and {starter.model} reads {starter.positions}, "
                "which leaves no room for a completion. Remove the rows that are this long, or use a model that reads more."
            )
        limit += new_tokens
    policy["max_total_sequence_length"] = limit if starter.positions is None else min(limit, starter.positions)
    policy["train_micro_batch_size"] = 4
    policy["optimizer"] = {"kwargs": {"lr": 1.0e-5 if starter.is_small else 1.0e-6}}
    if starter.samples:
        policy["generation"] = {"backend": "hf", "max_new_tokens": new_tokens}
    return policy


def _data(starter: Starter) -> dict[str, Any]:
    data: dict[str, Any] = {"train": _dataset(starter, starter.train)}
    if starter.validation is not None:
        data["validation"] = _dataset(starter, starter.validation)
    elif starter.validates:
        data["split"] = {"validation": _held_out(starter.rows)}
    takes_prompt = starter.samples and starter.form.answer_key is not None and starter.asks_for_format
    if takes_prompt and starter.math and starter.has_text_prompts:
        data["prompt"] = {"prompt_config": "generic/math"}
    elif takes_prompt and starter.has_template:
        request = "Put the final answer in \\boxed{}." if starter.math else _FINAL_ANSWER
        data["prompt"] = {"system_prompt": request}
    return data


def _dataset(starter: Starter, source: Mapping[str, Any]) -> dict[str, Any]:
    keys = dict(starter.form.keys)
    name = source["dataset_name"]
    if starter.algorithm in PAIRS:
        name = {"jsonl": "preference", "parquet": "preference_parquet"}[name]
        keys |= {"split_pairs": True} if starter.algorithm == "kto" and "label_key" not in keys else {}
    if starter.algorithm == "sft" and starter.form.response_key is not None:
        keys |= {"response_key": starter.form.response_key, "output_key": None}
    elif starter.algorithm == "sft" and "record_fn" not in keys and keys.get("input_key") == "messages":
        keys["output_key"] = None
    skips = {"on_bad_row": "skip"} if starter.skips_bad_rows else {}
    return {"dataset_name": name, "path": source["path"], **keys, **skips}


def _rounded_up(tokens: int) -> int:
    return -(-tokens // _ROUNDED_TO) * _ROUNDED_TO


_FREE: Final = 0.08
"""Fraction of each GPU that is left for what a plan does not count: CUDA contexts, NCCL, gathered layers, fragmentation."""
_BATCHES: Final = ((False, 16384), (False, 8192), (True, 8192), (True, 0))
"""Activation checkpointing and tokens of a microbatch, which has at least one row."""
_ENGINES: Final = ((1, 0.5), (1, 0.8), (2, 0.5), (4, 0.5), (8, 0.5))
"""Tensor parallelism and share of the GPU of vLLM."""
_ENGINE_PHASES: Final = ("rollout", "refit")
_LORA_RANK: Final = 32
_LORA_RATE: Final = 10.0
"""Learning rate of adapters, relative to that of all weights (https://thinkingmachines.ai/blog/lora/)."""
_LARGER: Final = ("24GiB", "80GiB", "8x80GiB", "2x8x80GiB")
RECIPE_COMMENTS: Final = {
    "policy.optimizer.kwargs.lr": "1e-5 for models below a billion parameters, 1e-6 above; ten times as much with LoRA",
    "policy.precision": "weights and activations; optimizer state is float32",
    "policy.activation_checkpointing": "recomputes activations: a third more time, less memory",
    "policy.dynamic_batching.train_mb_tokens": "tokens of a training microbatch",
    "policy.dynamic_batching.logprob_mb_tokens": "tokens of a scoring microbatch",
    "policy.hf_cfg.data_parallel": "shards weights, gradients and optimizer state over the GPUs",
    "policy.hf_cfg.fsdp_num_shards": "one copy of the model per node",
    "policy.hf_cfg.lora.rank": "adapters are trained, because all weights do not fit",
    "policy.generation.backend": "samples on the same GPUs, between the training phases",
    "policy.generation.vllm_cfg.tensor_parallel_size": "GPUs that share a copy of the engine's weights",
    "policy.generation.vllm_cfg.gpu_memory_utilization": "share of each GPU while the engine samples",
    "policy.generation.vllm_cfg.sleep_level": "frees the engine's memory before training; 0 keeps it",
    "policy.generation.refit_transport": "weights stay on the GPU (CUDA IPC)",
}
"""Comments of the keys that a recipe sets."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal nodes with equal GPUs; `size` is the memory of one GPU in bytes."""

    nodes: int
    gpus: int
    size: int

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.gpus} x {format_size(self.size)}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The sections of a config, and its plan."""

    values: Mapping[str, Any]
    plan: MemoryPlan

    def description(self, hardware: Hardware) -> str:
        """Comment lines for the config."""
        peak = f"{format_size(self.plan.peak)} on each GPU, in phase {self.plan.peak_phase}"
        return (
            f"# For {hardware}: computed by `rlcore plan`, not run on such hardware. Predicted peak:\n"
            f"# {peak}. {_FREE:.0%} of the GPU is left for what the plan does not count.\n"
        )


def parse_hardware(text: str) -> Hardware:
    """Hardware such as `24GiB`, `8xh100` or `2x8x80GiB`: nodes, GPUs of a node, memory or name of a GPU.

    Raises:
        UserError: It has another form.
    """
    from rl_train.plan.time_plan import Gpu, parse_gpu

    matched = re.fullmatch(r"(?:(?:(\d+)\s*x\s*)?(\d+)\s*x\s*)?(\S.*)", text.strip())
    numbers = (1, 1) if matched is None else (int(matched[1] or 1), int(matched[2] or 1))
    if matched is None or 0 in numbers:
        raise ConfigError(f"--gpus {text} is not a number of GPUs with their size. Write [[NODES x] GPUS x] SIZE: 2x8x80GiB.")
    gpu = parse_gpu(matched[3], "--gpus")
    return Hardware(nodes=numbers[0], gpus=numbers[1], size=gpu.memory if isinstance(gpu, Gpu) else gpu)


def fit(values: Mapping[str, Any], hardware: Hardware, registry: Registry, *, model: str) -> Recipe:
    """The first candidate that fits the hardware.

    Args:
        values: Sections of a config.
        hardware: What it is to run on.
        registry: Used to look up the backends.
        model: Name or absolute path of the model.

    Raises:
        ConfigError: None fits; says by how much, and on what hardware one would.
    """
    fitter = _Fitter(values, registry, model)
    if (recipe := fitter.first(hardware)) is not None:
        return recipe
    assert fitter.least is not None
    plan, room = fitter.least.plan, int(hardware.size * (1 - _FREE))
    others = [other for text in _LARGER if _is_larger(other := parse_hardware(text), hardware)]
    fitting = next((other for other in others if fitter.first(other, smallest=True) is not None), None)
    raise ConfigError(
        f"No candidate fits {hardware}: the smallest needs {format_size(plan.peak)} of each GPU in phase {plan.peak_phase}, "
        f"{format_size(plan.peak - room)} more than the {1 - _FREE:.0%} of a GPU that may be used, mostly "
        f"{plan.largest_process.largest_part}. "
        + (f"{fitting} would fit. " if fitting else "Use more GPUs or a smaller model. ")
        + "Shorter rows need less (`rlcore data show`)."
    )


def _is_larger(one: Hardware, other: Hardware) -> bool:
    return (one.nodes * one.gpus, one.size) > (other.nodes * other.gpus, other.size) and one.size >= other.size


class _Fitter:
    """Plans candidates; remembers the one that needs the least."""

    def __init__(self, values: Mapping[str, Any], registry: Registry, model: str) -> None:
        self._values, self._registry, self._model = values, registry, model
        self.least: Recipe | None = None

    def first(self, hardware: Hardware, *, smallest: bool = False) -> Recipe | None:
        """The first candidate that fits, or None.

        Args:
            hardware: What it is to run on.
            smallest: Whether to plan the smallest microbatches only.
        """
        cluster = {"num_nodes": hardware.nodes, "workers_per_node": hardware.gpus, "use_gpus": True}
        base = _merged(self._values, {"cluster": cluster, "policy": {"precision": "bfloat16"}})
        for layout in _layouts(hardware, base["policy"]["optimizer"]["kwargs"]["lr"]):
            for engine in self._engines(hardware):
                *larger, last = self._batches(_merged(base, {"policy": {**layout, **engine}}))
                least = self._planned(last, hardware)
                if least.plan.fits:
                    others = () if smallest else (self._planned(values, hardware) for values in larger)
                    return next((recipe for recipe in others if recipe.plan.fits), least)
                if least.plan.peak_phase not in _ENGINE_PHASES:
                    break  # the layout does not fit with any engine
        return None

    def _engines(self, hardware: Hardware) -> Iterator[Mapping[str, Any]]:
        if "generation" not in self._values["policy"] or "vllm" not in self._registry.names("generation"):
            yield {}
            return
        for processes, share in _ENGINES:
            if hardware.gpus % processes == 0:
                own = {"tensor_parallel_size": processes, "gpu_memory_utilization": share, "sleep_level": 2}
                yield {"generation": {"backend": "vllm", "refit_transport": "shared_memory", "vllm_cfg": own}}

    def _batches(self, values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The candidates of a layout, the largest microbatches first."""
        longest = values["policy"]["max_total_sequence_length"]
        policy = {key: value for key, value in values["policy"].items() if key != "train_micro_batch_size"}
        for checkpointing, budget in _BATCHES:
            tokens = max(longest, budget)
            batching = {"enabled": True, "train_mb_tokens": tokens, "logprob_mb_tokens": tokens}
            yield {
                **values,
                "policy": {**policy, "activation_checkpointing": checkpointing, "dynamic_batching": batching},
            }

    def _planned(self, values: Mapping[str, Any], hardware: Hardware) -> Recipe:
        from rl_train.config.loader import load_config
        from rl_train.plan.planner import plan_memory

        # Rewards are written after the config, and the model's path is relative to its folder.
        read = _merged({key: value for key, value in values.items() if key != "env"}, {"policy": {"model_name": self._model}})
        run = load_config(read, registry=self._registry, stages=()).run
        plan = plan_memory(run, self._registry, on_gpu=True, limit=hardware.size)
        recipe = Recipe(values=values, plan=replace(plan, limit=int(hardware.size * (1 - _FREE))))
        if self.least is None or plan.peak < self.least.plan.peak:
            self.least = recipe
        return recipe


def _layouts(hardware: Hardware, rate: float) -> Iterator[Mapping[str, Any]]:
    yield {}
    if hardware.gpus > 1 and hardware.nodes > 1:
        yield {"hf_cfg": {"data_parallel": "fsdp2", "fsdp_num_shards": hardware.gpus}}
    if hardware.gpus * hardware.nodes > 1:
        yield {"hf_cfg": {"data_parallel": "fsdp2"}}
    lora = {"rank": _LORA_RANK, "alpha": _LORA_RANK}
    yield {"hf_cfg": {"lora": lora}, "optimizer": {"kwargs": {"lr": float(f"{_LORA_RATE * rate:.3g}")}}}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            key: _merged(base[key], value) if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) else value
            for key, value in over.items()
        },
    }
