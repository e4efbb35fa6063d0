"""The values and comments of the config that `rlcore init` writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.errors import ConfigError
from rlcore_cli.counting import counted
from rlcore_cli.starter.reward_files import reward_function
from rlcore_cli.starter.row_format import RowFormat

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
    "policy.backend": "Transformers; `rlcore list-backends` shows the others",
    "policy.model_name": "a model folder, a GGUF file, or a name on the hub",
    "policy.max_total_sequence_length": "tokens of the longest row, prompt and completion together",
    "policy.optimizer.kwargs.lr": "1e-5 for models below a billion parameters, 1e-6 above",
    "policy.generation.backend": "`vllm` is faster on GPUs",
    "data.split.validation": "chance of each row to be held out and never trained on",
    "data.prompt.prompt_config": "asks for the answer in \\boxed{}, which `math` reads",
    "data.prompt.system_prompt": "what the reward function reads",
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
    task: str
    """Name of the environment's section, if the algorithm samples."""
    math: bool
    """Whether the environment `math` grades the answers, instead of a reward function."""
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
        section: dict[str, Any] = (
            ({} if starter.requires_box else {"require_box": False})
            if starter.math
            else {"reward_fn": reward_function(has_answers=starter.form.answer_key is not None)}
        )
        if not starter.math and starter.form.answer_key is not None:
            section["correct_above"] = 0.5
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
    size = min(8 if starter.algorithm != "sft" else 16, _training_rows(starter))
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
    if starter.chat_template is not None:
        policy["tokenizer"] = {"chat_template": starter.chat_template}
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
    if starter.algorithm in ("dpo", "rm"):
        name = {"jsonl": "preference", "parquet": "preference_parquet"}[name]
    if starter.algorithm == "sft" and starter.form.response_key is not None:
        keys |= {"response_key": starter.form.response_key, "output_key": None}
    elif starter.algorithm == "sft" and "record_fn" not in keys and keys.get("input_key") == "messages":
        keys["output_key"] = None
    skips = {"on_bad_row": "skip"} if starter.skips_bad_rows else {}
    return {"dataset_name": name, "path": source["path"], **keys, **skips}


def _rounded_up(tokens: int) -> int:
    return -(-tokens // _ROUNDED_TO) * _ROUNDED_TO
