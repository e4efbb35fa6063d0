"""Config sections of the environments, and of the datasets that generate their records. Lightweight imports only.

Environments for data of any source come first, then those that have a dataset here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from rl_core.config.schema import DatasetConfig, EnvironmentConfig, ToolEnvironmentConfig
from rl_core.config.section import NAME_OR_PATH, Section, check_template_kwargs
from rl_sandbox.config import SandboxConfig


class MathEnvironmentConfig(EnvironmentConfig):
    """`env.math`: the final answer must equal the expected one."""

    timeout_s: float = Field(default=5.0, gt=0.0)
    """CPU time limit of one comparison, in seconds. When it expires, the process is killed and the answer counts as wrong."""
    num_processes: int = Field(default=1, ge=1)
    """Number of processes per worker that compare answers."""
    require_box: bool = True
    r"""Whether to grade only the content of the last `\boxed{}`. If false, a completion without a box is graded by its last
    stated answer."""
    allow_unevaluated: bool = False
    """Whether to accept answers with unevaluated arithmetic, such as `3 + 2` for 5 or `(x+1)^2` for `x^2+2x+1`."""


class CodeEnvironmentConfig(EnvironmentConfig):
    """`env.code`: the completion's program must pass the tests of its row."""

    reward: Literal["all_passed", "passed_share"] = "all_passed"
    """Reward of a program, and its name: `all_passed` is 1.0 if all tests pass, else 0.0; `passed_share` is the fraction of
    tests that pass."""
    max_concurrency: int = Field(default=4, ge=1)
    """Maximum number of programs that a worker runs at the same time, each in its own session."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where programs run, and their limits. `timeout_s` applies to all assertions of a row together and to each pair of
    `stdin_stdout`. All tests of a row together may take half of `step_timeout_s`; the tests that are left then fail."""


class InstructionFollowingConfig(EnvironmentConfig):
    """`env.instruction_following`: a program checks constraints on the form of an answer."""

    reward: Literal["all", "fraction"] = "all"
    """Reward of an answer: 1.0 if it follows all instructions of its row and 0.0 otherwise, or the fraction that it follows."""


PLACEHOLDER = re.compile(r"\{(\w+)\}")
PLACEHOLDERS = ("question", "answer", "reference", "tag")


class JudgeEnvironmentConfig(EnvironmentConfig):
    """`env.judge`: a language model behind an OpenAI-compatible server scores the answer."""

    model: str
    """Name of the judge's model on the server."""
    base_url: str
    """URL of the server up to the version, such as `http://localhost:8000/v1`."""
    api_key: str | None = Field(default=None, repr=False)
    """API key of the server; read it from the environment with `${oc.env:JUDGE_API_KEY}`."""
    prompt: str | None = None
    """Message to the judge, with `{question}`, `{answer}` and optionally `{reference}`, the row's expected answer. `{answer}`
    is inserted between `<{tag}>` and `</{tag}>`, which the answer cannot contain. If the prompt does not contain `{tag}`, a
    sentence at its end explains the tags. The default prompt asks for a comparison with the expected answer, if there is one,
    and for a last line `Score: N`."""
    system_prompt: str | None = None
    """System message to the judge; null for none."""
    score_pattern: str = (
        r"(?im)^[^\w\n]*+(?:(?:my|the|final|overall|total)\W+){0,2}score[\s*_\"'`]*+(?:[:\uff1a=]|(?:-|\u2013|\u2014)(?=\s))?"
        r"[\s*_\"'`(\[]*+(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?))?[^\w%\u2030]*\Z"
    )
    """Regular expression with the score as its first group and optionally the end of its scale as its second; its last match in
    the reply counts. By default, it reads the last line, as in `Score: 7`, `**Final score:** 7.5` or `Score: 7/10`, if nothing
    follows it. A row is not scored if the reply has no match, if the score is out of range, if its scale ends elsewhere than at
    `max_score` (`7/100`), or if the reply may quote the answer, which contains the same words."""
    min_score: float = 0.0
    """Score that becomes the reward 0.0."""
    max_score: float = 10.0
    """Score that becomes the reward 1.0."""
    correct_above: float | None = Field(default=None, ge=0.0, lt=1.0)
    """An answer counts as correct in `accuracy` if its reward is above this number. By default there is no accuracy."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum number of tokens of the judge's reply."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, such as `{seed: 1}`."""
    concurrency: int = Field(default=16, ge=1)
    """Maximum number of requests at the same time, for each of the `num_workers`."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Timeout of one attempt, in seconds."""
    deadline_s: float = Field(default=300.0, gt=0.0)
    """Timeout of one request with all its attempts, in seconds."""
    max_retries: int = Field(default=4, ge=0)
    """Maximum number of retries after a timeout, a connection error, or a status such as 429 or 503. Pauses between attempts
    grow from 0.5 to 30 seconds, or are as long as the server requests."""
    max_failures: int = Field(default=32, ge=1)
    """Number of consecutive failed requests (after all retries) that makes the environment step fail. With fewer
    failures, only the rows of the failed requests are not scored."""
    input_price: float = Field(default=0.0, ge=0.0)
    """Price per million input tokens, for the metric `cost`."""
    output_price: float = Field(default=0.0, ge=0.0)
    """Price per million output tokens, for the metric `cost`."""

    @field_validator("prompt")
    @classmethod
    def _has_placeholders(cls, prompt: str | None) -> str | None:
        if prompt is None:
            return None
        names = set(PLACEHOLDER.findall(prompt))
        if unknown := sorted(names - set(PLACEHOLDERS)):
            raise ValueError(f"prompt has the placeholder {{{unknown[0]}}}: allowed are {', '.join(PLACEHOLDERS)}")
        if "answer" not in names:
            raise ValueError("prompt has no {answer}, so the judge would not see the answer: add it")
        return prompt

    @field_validator("score_pattern")
    @classmethod
    def _has_a_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"score_pattern is not a regular expression: {error}") from error
        if groups not in (1, 2):
            raise ValueError(
                f"score_pattern has {groups} groups: write one around the score, optionally one around the end of its scale, "
                "and (?:...) for others"
            )
        return pattern

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> JudgeEnvironmentConfig:
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score ({self.min_score}) must be below max_score ({self.max_score})")
        return self


class RewardModelEnvironmentConfig(EnvironmentConfig):
    """`env.reward_model`: a trained reward model scores the conversation."""

    model_name: Annotated[str, NAME_OR_PATH]
    """Folder or name of the reward model, a classifier with one label, such as `step_<n>/policy/weights` of an `rm`
    checkpoint."""
    tokenizer_name: Annotated[str | None, NAME_OR_PATH] = None
    """Name or folder of the tokenizer; defaults to that of the model."""
    chat_template: Annotated[str | None, NAME_OR_PATH] = None
    """Jinja chat template or its path; defaults to the one of the tokenizer."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] = Field(default_factory=dict)
    """Variables passed to the chat template, such as `{enable_thinking: false}`."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights and activations. Scores are always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the reward model. `auto` uses a GPU if the environment's process sees one."""
    batch_size: int = Field(default=32, ge=1)
    """Number of conversations per forward pass."""
    max_length: int = Field(default=4096, ge=1)
    """Maximum number of tokens to score. Longer conversations keep their last tokens, which contain the answer."""
    shift: float = 0.0
    """Value subtracted from every score, for example the mean score, so that rewards are centered at 0."""
    scale: float = 1.0
    """Factor of the reward: scale * (score - shift)."""

    @model_validator(mode="after")
    def _rewards_differ(self) -> RewardModelEnvironmentConfig:
        if self.scale == 0:
            raise ValueError("scale is 0, so every reward would be 0: remove it or set another factor")
        return self


class McpServerConfig(Section):
    """An MCP server (Model Context Protocol) whose tools the model can call; either `command` or `url`."""

    command: tuple[str, ...] = ()
    """Command that starts the server, which is then used over stdin and stdout. Each environment worker starts its own."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables of the command. It inherits only a few from the worker, such as `PATH` and `HOME`."""
    url: str | None = None
    """URL of a running server with the transport `streamable HTTP`, such as `http://localhost:8000/mcp`."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """HTTP headers of requests to `url`, such as `{Authorization: "Bearer ${oc.env:TOKEN}"}`."""
    tools: tuple[str, ...] | None = None
    """Names of the server's tools that the model can call; null: all."""
    per_rollout: bool = False
    """Whether every rollout has its own server (or connection to `url`), which starts with its first call and ends with it. If
    false, the rollouts of a worker share one."""
    start_timeout_s: float = Field(default=60.0, gt=0.0)
    """Seconds in which the server must have started and answered."""

    @model_validator(mode="after")
    def _has_one_transport(self) -> McpServerConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("set either command or url")
        if self.env and not self.command:
            raise ValueError("env applies to command, which is not set: remove env")
        if self.headers and self.url is None:
            raise ValueError("headers apply to url, which is not set: remove headers")
        return self


class ToolsEnvironmentConfig(ToolEnvironmentConfig):
    """`env.tools`: the model may call tools, and its final answer must equal the expected one."""

    tools: tuple[str, ...] = ("calculator",)
    """Tools that the model can call: `calculator`, `python`, or functions by path, such as `my_tools:search`."""
    mcp_servers: dict[str, McpServerConfig] = Field(default_factory=dict)
    """MCP servers, by any name. Their tools are offered in addition to `tools`, which may then be empty."""
    require_box: bool = True
    r"""Whether to grade only the content of the last `\boxed{}`. If false, an answer without a box is graded by its last number
    or formula."""
    grading_timeout_s: float = Field(default=5.0, gt=0.0)
    """CPU time limit of comparing one answer, in seconds. When it expires, the answer counts as wrong."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where the code of the tool `python` runs, and its limits. `timeout_s` applies to each call, and must be below
    `call_timeout_s`."""

    @model_validator(mode="after")
    def _has_tools(self) -> ToolsEnvironmentConfig:
        if not self.tools and not self.mcp_servers:
            raise ValueError("tools is empty: list at least one tool, or set mcp_servers")
        return self

    @model_validator(mode="after")
    def _sandbox_is_used(self) -> ToolsEnvironmentConfig:
        if "python" not in self.tools and self.sandbox != SandboxConfig():
            raise ValueError("sandbox applies to the tool `python`, which is not in `tools`: add it, or remove sandbox")
        if "python" in self.tools and self.sandbox.timeout_s >= self.call_timeout_s:
            raise ValueError(
                f"sandbox.timeout_s ({self.sandbox.timeout_s:g}) must be below call_timeout_s ({self.call_timeout_s:g}), so "
                "that the sandbox stops the code before the call is given up"
            )
        return self


class NemoGymConfig(EnvironmentConfig):
    """`env.nemo_gym`: a resources server of NeMo Gym, which has the tools and verifies the rollouts."""

    url: str = Field(pattern="^https?://")
    """URL of the resources server, such as `http://localhost:8000`."""
    max_tool_turns: int = Field(default=8, ge=0)
    """Maximum number of turns with tool calls in a rollout. Calls of later turns are not run, and the rollout is verified."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Timeout of one request, in seconds."""
    success_reward: float = 1.0
    """Reward from which a rollout counts as correct in `accuracy`."""

    @property
    def turns_needed(self) -> int:
        return self.max_tool_turns + 1


class GeneratedDatasetConfig(DatasetConfig):
    """Base section of the datasets that generate their records."""

    record_kind: ClassVar[Literal["conversations", "pairs"] | None] = "conversations"

    num_samples: int = Field(default=4096, ge=1)
    """Number of records."""


class ArithmeticEnvironmentConfig(EnvironmentConfig):
    """`env.arithmetic`: the completion must be exactly the number."""

    format_reward: float = Field(default=0.0, ge=0.0)
    """Reward added if the completion is a whole number, correct or not."""


class ArithmeticDatasetConfig(GeneratedDatasetConfig):
    """Generated arithmetic problems of the form `a + b =`, with a configurable number of digits."""

    dataset_name: str = "arithmetic"
    """Name of a registered dataset, or the dotted path of its class."""
    split: Literal["train", "validation"] = "train"
    """Which operand pairs to draw. One pair in eight is reserved for validation, in either order and for every operation."""
    operations: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)
    """Operations to draw from, with equal probability."""
    min_digits: int = Field(default=1, ge=1, le=9)
    """Minimum number of digits of an operand."""
    max_digits: int = Field(default=2, ge=1, le=9)
    """Maximum number of digits of an operand."""
    seed: int = 0
    """Random seed. Record i depends only on the seed, the split and i."""
    style: Literal["plain", "chat"] = "plain"
    """`plain`: the prompt is `12+34=`; `chat`: a question in words that asks for the answer in `\\boxed{}`."""
    with_response: bool = False
    """Whether to add the answer as the assistant's message, for supervised training."""
    forgotten_carries: float = Field(default=0.0, ge=0.0, le=1.0)
    """Fraction of the answers of `with_response` that drop the carry, such as 38+24=52, to train a model that makes this
    mistake. The expected answer stays correct."""

    @model_validator(mode="after")
    def _carries_need_sums(self) -> ArithmeticDatasetConfig:
        if self.forgotten_carries > 0 and (not self.with_response or self.operations != ["+"]):
            raise ValueError("forgotten_carries applies to the answers of sums: set with_response: true and operations: ['+']")
        return self

    @model_validator(mode="after")
    def _digits_in_order(self) -> ArithmeticDatasetConfig:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits ({self.min_digits}) is above max_digits ({self.max_digits}): no operand is allowed")
        return self


class ReasoningGymEnvironmentConfig(EnvironmentConfig):
    """`env.reasoning_gym`: the scorer of each row's Reasoning Gym task."""

    answer_tag: str | None = "answer"
    """XML tag around the final answer, whose last occurrence is scored; null scores the whole completion."""
    timeout_s: float = Field(default=5.0, gt=0.0)
    """CPU time limit of scoring one answer, in seconds. When it expires, the answer gets 0.0."""
    reward: Literal["score", "correct"] = "correct"
    """`correct` is 1.0 for the full score, else 0.0. `score` is the number that the task's scorer gives: many scorers give more
    than 0.3 to wrong answers, which training can exploit."""


class ReasoningGymDatasetConfig(GeneratedDatasetConfig):
    """Generated problems of a Reasoning Gym task."""

    dataset_name: str = "reasoning_gym"
    """Name of a registered dataset, or the dotted path of its class."""
    task: str = "leg_counting"
    """Name of the Reasoning Gym task, such as `countdown` or `spell_backward`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task, such as its difficulty: `{min_animals: 2, max_animals: 4}`."""
    seed: int = 0
    """Random seed. Record i depends only on the task, its settings, the seed and i; use another seed for validation data."""
    system_prompt: str | None = "Think step by step. Give only the final answer between <answer> and </answer>."
    """System message; null for none."""


class GuessNumberEnvironmentConfig(EnvironmentConfig):
    """`env.guess`: the model guesses numbers until it finds the secret one."""

    max_guesses: int = Field(default=7, ge=1)
    """Maximum number of guesses before the game is lost. Each takes one turn; a lower `max_rollout_turns` ends the game
    earlier."""
    higher: str = Field(default="higher", min_length=1)
    """Reply of the environment if the secret number is higher. A tiny tokenizer may need `+`."""
    lower: str = Field(default="lower", min_length=1)
    """Reply of the environment if the secret number is lower."""
    unreadable: str = Field(default="Say one whole number.", min_length=1)
    """Reply of the environment if the message is not a whole number, which counts as a guess."""

    @property
    def turns_needed(self) -> int:
        return self.max_guesses


class GuessNumberDatasetConfig(GeneratedDatasetConfig):
    """Secret numbers to guess."""

    dataset_name: str = "guess"
    """Name of a registered dataset, or the dotted path of its class."""
    num_samples: int = Field(default=1024, ge=1)
    """Number of records."""
    lowest: int = 1
    """Smallest secret number."""
    highest: int = 100
    """Largest secret number."""
    seed: int = 0
    """Random seed. Record i depends only on the seed and i."""
    question: str = "I think of a whole number from {lowest} to {highest}. Say one number a turn, and nothing else."
    """First message to the model; `{lowest}` and `{highest}` are replaced by their values."""

    @model_validator(mode="after")
    def _range_in_order(self) -> GuessNumberDatasetConfig:
        if self.lowest > self.highest:
            raise ValueError(f"lowest ({self.lowest}) is above highest ({self.highest}): the range is empty")
        return self


class SlidingPuzzleEnvironmentConfig(EnvironmentConfig):
    """`env.sliding_puzzle`: the model moves one tile per turn until the board is in order."""

    max_moves: int = Field(default=12, ge=1)
    """Maximum number of moves, legal or not, before the game is lost. Each takes one turn."""
    illegal_move_penalty: float = Field(default=0.0, ge=0.0)
    """Penalty subtracted from the reward for every message that is not a legal move."""

    @property
    def turns_needed(self) -> int:
        return self.max_moves


class SlidingPuzzleDatasetConfig(GeneratedDatasetConfig):
    """Shuffled boards, each made from the solved one by legal moves, so that every board can be solved."""

    dataset_name: str = "sliding_puzzle"
    """Name of a registered dataset, or the dotted path of its class."""
    num_samples: int = Field(default=1024, ge=1)
    """Number of records."""
    size: int = Field(default=3, ge=2, le=6)
    """Number of rows and columns of a board."""
    min_shuffles: int = Field(default=1, ge=1)
    """Minimum number of random moves that shuffle a solved board. A board shuffled by n moves can be solved in at most n."""
    max_shuffles: int = Field(default=4, ge=1)
    """Maximum number of random moves. The number is drawn uniformly from the range."""
    split: Literal["train", "validation"] | None = None
    """Which boards to draw. One board in eight is reserved for validation, by a hash of the board. Null: all boards."""
    seed: int = 0
    """Random seed. Record i depends only on the seed, the size, the split, the range of shuffles and i."""

    @model_validator(mode="after")
    def _shuffles_in_order(self) -> SlidingPuzzleDatasetConfig:
        if self.min_shuffles > self.max_shuffles:
            raise ValueError(
                f"min_shuffles ({self.min_shuffles}) is above max_shuffles ({self.max_shuffles}): the range is empty"
            )
        return self
