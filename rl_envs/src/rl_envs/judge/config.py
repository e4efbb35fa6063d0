"""The section of the environment `judge`. Lightweight imports only."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from rl_core.config.schema import EnvironmentConfig

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
