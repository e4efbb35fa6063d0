"""Bodies of requests. Fields that the server does not support are named in an error instead of being ignored."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from rl_serve.errors import ApiError, model_not_found
from rl_serve.token_images import TokenImage

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], FailFast()]
_LISTS: dict[type, TypeAdapter[Any]] = {
    str: TypeAdapter(Annotated[list[str], FailFast()]),
    int: TypeAdapter(TokenIds),
    list: TypeAdapter(Annotated[list[TokenIds], FailFast()]),
}
"""How a list is validated, by the type of its first element: validating against a union reports each element for each type."""


def _expects(form: str, *elements: type) -> WrapValidator:
    """Accept a string, and lists of these types of elements; report one problem for any other value."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            if not isinstance(value, list) or not value:
                return validate(value)
            if type(value[0]) in elements:
                return _LISTS[type(value[0])].validate_python(value, strict=True)
        except ValidationError:
            pass
        raise ValueError(f"expected {form}")

    return WrapValidator(check)


Prompts = Annotated[
    str | list[str] | list[TokenId] | list[list[TokenId]],
    _expects(
        "a string, a list of strings, a list of token ids (non-negative integers), or a list of such lists", str, int, list
    ),
]
StopStrings = Annotated[str | list[str] | None, _expects("a string or a list of strings", str)]
_MAX_MESSAGES = 10_000
_MAX_STOP_STRINGS = 16
_MAX_STOP_CHARS = 1000
_MAX_STOP_TOKENS = 128
MAX_ALTERNATIVES = 20
"""Number of most likely tokens that a request may ask for, as in OpenAI's API."""


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    """Whether a last chunk has the token counts."""


class StreamedRequest(BaseModel):
    """A request whose response may be a stream."""

    stream: bool | None = False
    """Whether completions are sent as server-sent events while they are sampled."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class GradedRequest(StreamedRequest):
    """A chat request whose answers may be graded."""

    expected_answer: str | int | float | None = None
    """Right answer; choices then have `predicted_answer` and `is_correct`. A proxy does not send it to the backend."""

    def record(self) -> dict[str, Any]:
        """The fields for grading.

        Raises:
            ApiError: a streamed answer cannot be graded.
        """
        if self.expected_answer is None:
            return {}
        if self.stream:
            raise ApiError(400, "expected_answer requires a response without `stream`.", param="expected_answer")
        return {"expected_answer": self.expected_answer}


class RequestBody(BaseModel):
    """A JSON object, of which further fields are kept."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    """Name of the served model."""

    @model_validator(mode="before")
    @classmethod
    def _is_an_object(cls, body: Any) -> Any:
        if body is None:  # empty, or not read
            raise ValueError("the body must be a JSON object, sent with the header `Content-Type: application/json`")
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        return body

    def refuse_other_model(self, name: str) -> None:
        """Refuse a request that names a model other than the served one.

        Raises:
            ApiError: names both.
        """
        if self.model is not None and self.model != name:
            raise model_not_found(self.model, [name])

    def fields(self) -> dict[str, Any]:
        """The fields that the request has, as they were sent; lists are not copied."""
        sent = {name: getattr(self, name) for name in self.model_fields_set}
        return {
            name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
            for name, value in sent.items()
        }


class SamplingParameters(BaseModel):
    """How each completion is sampled."""

    model_config = ConfigDict(strict=True)

    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    """0 for greedy decoding; by default the engine's."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """By default the engine's."""
    top_k: int | None = Field(default=None, ge=-1)
    """Number of most likely tokens to sample from, 0 or -1 for all; by default the engine's."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Smallest probability of a token, as a share of the highest; 0 by default."""
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, allow_inf_nan=False)
    """Divides the logits of tokens in prompt and completion if they are positive, else multiplies them; 1 by default."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logit of each token that was sampled before; 0 by default."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logit of each token, times how often it was sampled before; 0 by default."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Equal seeds give equal completions under the same weights; random by default."""
    stop: StopStrings = None
    """Strings that end a completion; they are not part of its text."""
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=_MAX_STOP_TOKENS)
    """Tokens that end a completion; they are part of it, and of its text unless they are special tokens."""

    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings.

        Raises:
            ApiError: one is empty, or there are too many.
        """
        stops = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > _MAX_STOP_STRINGS or not all(stops):
            raise ApiError(400, f"stop must have at most {_MAX_STOP_STRINGS} strings, none of them empty.", param="stop")
        if max(map(len, stops), default=0) > _MAX_STOP_CHARS:
            raise ApiError(400, f"stop must have strings of at most {_MAX_STOP_CHARS} characters.", param="stop")
        return stops

    def sampling(self) -> dict[str, Any]:
        """The parameters that are set."""
        return {name: value for name in SamplingParameters.model_fields if (value := getattr(self, name)) is not None}

    def row_options(self) -> dict[str, Any]:
        """The parameters with an effect that only some engines support, see `row_options` of `WorkerFacts`."""
        neutral = {
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_p": 0.0,
            "stop_token_ids": [],
        }
        return {name: value for name, one in neutral.items() if (value := getattr(self, name)) not in (None, one)}


class SamplingRequest(RequestBody, SamplingParameters, StreamedRequest):
    """Fields that all sampling endpoints of OpenAI's API share."""

    accepts_as_no_op: ClassVar[tuple[str, ...]] = ("user", "metadata", "safety_identifier", "prompt_cache_key", "request_id")
    """Fields about the caller, which change no completion."""

    n: int = Field(default=1, ge=1)
    """Number of completions per prompt."""
    return_token_ids: bool = False
    """Whether choices have `token_ids` (with the tokens that ended the completion) and `prompt_token_ids`."""

    @field_validator(
        "n", "stream", "logprobs", "echo", "return_token_ids", "continue_final_message", mode="wrap", check_fields=False
    )
    @classmethod
    def _null_is_default(cls, value: Any, read: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        # OpenAI's API allows null for them.
        return cls.model_fields[info.field_name or ""].default if value is None else read(value)

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the completions and that the server does not support.

        Raises:
            ApiError: names all of them.
        """
        refuse_unsupported_fields(self.model_extra or {}, no_ops=self.accepts_as_no_op)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options requires `stream: true`.", param="stream_options")


class CompletionRequest(SamplingRequest):
    """Body of `/v1/completions`."""

    prompt: Prompts
    """One or several prompts, as text or as token ids."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Maximum number of tokens of a completion; by default the server's limit. With `echo` 0 is allowed: the prompt alone."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    """Number of most likely tokens to return log-probabilities of at each position; 0 returns those of the sampled tokens."""
    echo: bool = False
    """Whether the text of a choice begins with its prompt, and its `logprobs` with those of the prompt's tokens."""
    add_special_tokens: bool = True
    """Whether a text begins with the tokens that the tokenizer puts before texts, such as a beginning-of-sequence token."""

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.max_tokens == 0 and not self.echo:
            text = "max_tokens must be at least 1. With `echo: true` it may be 0, for the prompt alone."
            raise ApiError(400, text, param="max_tokens")
        if self.stream and self.echo and (self.logprobs is not None or self.max_tokens == 0):
            text = f"echo with {'max_tokens: 0' if self.logprobs is None else 'logprobs'} cannot be streamed. Remove stream."
            raise ApiError(400, text, param="stream", code="unsupported_parameter")


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(min_length=1)
    content: str | list[dict[str, Any]] | None = None


Messages = Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=_MAX_MESSAGES)]


def _limit_of(body: BaseModel, name: str, second: str, relation: str) -> tuple[int | None, str]:
    """A maximum number of tokens that has two names, None if it is not given, and the name under which it is given.

    Raises:
        ApiError: it is given under both names.
    """
    limit, other = getattr(body, name), getattr(body, second)
    if limit is not None and other is not None:
        raise ApiError(400, f"{second} is {relation} of {name}: set one of them.", param=second)
    return (limit, name) if other is None else (other, second)


class ChatRequest(SamplingRequest, GradedRequest):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    """The conversation."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Earlier name of `max_completion_tokens`."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of a completion; by default the server's limit."""
    logprobs: bool = False
    """Whether choices have the log-probability of each sampled token."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    """Number of most likely tokens whose log-probabilities are returned at each position; requires `logprobs`."""
    response_format: dict[str, Any] | None = None
    """Form of the message: `text`, the default, `json_object` or `json_schema`."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call; the chat template shows them."""
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, the default, `none`, which hides the tools from the model, `required`, or a function that must be called."""
    parallel_tool_calls: bool | None = None
    """Whether a message may have several calls; only true is supported."""
    continue_final_message: bool = False
    """Whether the last message, one of the assistant, is the beginning of the answer, which has only the continuation."""
    add_generation_prompt: bool | None = None
    """The opposite of `continue_final_message`, if it is given."""

    def token_limit(self) -> tuple[int | None, str]:
        """The maximum number of tokens, and the name under which it is given.

        Raises:
            ApiError: it is given under both names.
        """
        return _limit_of(self, "max_completion_tokens", "max_tokens", "the earlier name")

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.add_generation_prompt is self.continue_final_message:
            wanted, given = (str(value).lower() for value in (not self.continue_final_message, self.continue_final_message))
            text = f"add_generation_prompt must be {wanted} or absent, because continue_final_message is {given}."
            raise ApiError(400, text, param="add_generation_prompt")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            role = self.messages[-1].role
            text = f"continue_final_message requires a last message of the assistant, but its role is {role!r}."
            raise ApiError(400, text, param="messages")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs requires `logprobs: true`.", param="top_logprobs")


class GenerateRequest(RequestBody, SamplingParameters):
    """Body of `/generate`: the fields of a record, which fill the prompt config, and how to sample."""

    question: str | None = None
    """The question; also fills `{problem}`."""
    expected_answer: str | int | float | None = None
    """Right answer; the response then has `predicted_answer` and `is_correct`."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of each message of the model."""
    tokens_to_generate: int | None = Field(default=None, ge=1)
    """Another name of `max_tokens`."""

    def token_limit(self) -> tuple[int | None, str]:
        """As `ChatRequest.token_limit`."""
        return _limit_of(self, "max_tokens", "tokens_to_generate", "another name")

    def record(self) -> dict[str, Any]:
        """The fields of the record: all except the sampling parameters."""
        return self.model_dump(
            exclude={"model", *SamplingParameters.model_fields, "max_tokens", "tokens_to_generate"}, exclude_none=True
        )


class TokenSamplingParameters(SamplingParameters):
    """`sampling_params` of `/inference/v1/generate`."""

    model_config = ConfigDict(extra="allow", strict=True)

    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: Literal[0] | None = None


class GenerateTokensRequest(RequestBody):
    """Body of `/inference/v1/generate`: token ids in, token ids out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: TokenIds = Field(min_length=1)
    """The prompt."""
    images: list[TokenImage] = Field(default_factory=list)
    """The images in the prompt."""
    sampling_params: TokenSamplingParameters = Field(default_factory=TokenSamplingParameters)
    request_id: str | None = Field(default=None, max_length=200)


class ForwardedCompletionRequest(RequestBody):
    """Body of a proxy's `/v1/completions`; the backend checks all fields but these."""

    stream: bool | None = False


class ForwardedTokensRequest(RequestBody):
    """Body of a proxy's `/inference/v1/generate`; the backend checks all fields but these."""

    token_ids: TokenIds = Field(min_length=1)


class ForwardedChatRequest(RequestBody, GradedRequest):
    """Body of a proxy's `/v1/chat/completions`; the backend checks all fields but these."""

    messages: Messages
    n: int | None = Field(default=1, ge=1)


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "detokenize": (True,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Values with which an unsupported field of OpenAI's or vLLM's API changes nothing, besides null."""


def refuse_unsupported_fields(fields: Mapping[str, Any], *, no_ops: Collection[str] = (), where: str = "") -> None:
    """Refuse fields that the server does not support and that would change a completion.

    Args:
        fields: the fields that a request has and its model does not declare.
        no_ops: those that change nothing, whatever their value.
        where: path of the fields in the request, with a final dot.

    Raises:
        ApiError: names all of them.
    """
    refused = sorted(
        where + name
        for name, value in fields.items()
        if value is not None and name not in no_ops and value not in _NEUTRAL.get(name, ())
    )
    if refused:
        raise ApiError(
            400,
            f"Unsupported: {', '.join(refused)}. Remove {'it' if len(refused) == 1 else 'them'}.",
            param=refused[0],
            code="unsupported_parameter",
        )


_MAX_SCHEMA_CHARS = 2**16
_MAX_COUNT = 100_000
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
"""Keywords whose value decides how large the compiled grammar is."""


def read_response_format(response_format: Any) -> dict[str, Any] | None:
    """The JSON schema that a message must fit; None if it is text.

    Raises:
        ApiError: the format is not one of OpenAI's API, or the schema is too large.
    """
    if response_format is None or response_format == {"type": "text"}:
        return None
    if response_format == {"type": "json_object"}:
        return {"type": "object"}
    is_schema = isinstance(response_format, Mapping) and response_format.get("type") == "json_schema"
    described = response_format.get("json_schema") if is_schema else None
    if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
        raise ApiError(
            400,
            'response_format must be {"type": "text"}, {"type": "json_object"}, or '
            '{"type": "json_schema", "json_schema": {"name": STRING, "schema": SCHEMA}}.',
            param="response_format",
        )
    schema = described.get("schema", {"type": "object"})
    if not isinstance(schema, Mapping):
        raise ApiError(400, "response_format.json_schema.schema must be an object.", param="response_format")
    return refuse_large_schema(schema, param="response_format")


def refuse_large_schema(schema: Mapping[str, Any], *, param: str) -> dict[str, Any]:
    """The schema.

    Raises:
        ApiError: compiling it could take long.
    """
    if len(json.dumps(schema, ensure_ascii=False)) > _MAX_SCHEMA_CHARS:
        raise ApiError(400, f"{param} has a JSON schema of more than {_MAX_SCHEMA_CHARS} characters.", param=param)
    unread: list[Any] = [schema]
    while unread:
        value = unread.pop()
        if isinstance(value, Mapping):
            for keyword in _COUNTS:
                count = value.get(keyword)
                if isinstance(count, int | float) and count > _MAX_COUNT:
                    raise ApiError(400, f"{param} has a JSON schema with {keyword} above {_MAX_COUNT}.", param=param)
            unread += value.values()
        elif isinstance(value, list):
            unread += value
    return dict(schema)
