"""Records of datasets, and messages of conversations in OpenAI's form with tool calls and tools. Does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict, cast

from rl_core.errors import DataError, format_value


class TextPart(TypedDict):
    """A part of a message's content that is text."""

    type: Literal["text"]
    text: str


class ImageURL(TypedDict):
    """An image as `data:image/png;base64,...`."""

    url: str
    detail: NotRequired[Literal["auto", "low", "high"]]


class ImagePart(TypedDict):
    """A part of a message's content that is an image, as in OpenAI's API and in observations of environments."""

    type: Literal["image_url"]
    image_url: ImageURL


class ImageReference(TypedDict):
    """An image of a prompt, as environments and logs have it.

    Attributes:
        type: Always `image`.
        digest: Hash of its tensors, see `rl_core.data.images.RowImage`.
        width: Width of the picture before it was resized, in pixels.
        height: Its height.
        path: The file; absent if the row of the dataset contains the picture.
    """

    type: Literal["image"]
    digest: str
    width: int
    height: int
    path: NotRequired[str]


ContentPart = TextPart | ImagePart | ImageReference


class FunctionCall(TypedDict):
    """The function that a tool call names, and its arguments by parameter name, which are empty if the call is invalid."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """A call of a function by the model.

    Attributes:
        id: Identifies the call; the result's `tool_call_id`.
        type: Always `function`.
        function: Name and arguments.
        error: Why the call is invalid, for example because its arguments are not valid JSON. Absent from valid calls.
    """

    id: NotRequired[str]
    type: Literal["function"]
    function: FunctionCall
    error: NotRequired[str]


class FunctionSpec(TypedDict):
    """A function that is offered to the model; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]


class ToolSpec(TypedDict):
    """A tool that is offered to the model; only functions exist."""

    type: Literal["function"]
    function: FunctionSpec


class Message(TypedDict):
    """A message with text content. Every message that an environment receives has this form.

    Messages of prompts with images are the exception: they are `PartsMessage` with `ImageReference` parts.

    Attributes:
        role: `system`, `user`, `assistant`, `tool` or `environment`. Chat templates render `environment`, and other roles that
            data cannot contain, as `user`.
        content: The text.
        tool_calls: The calls in an assistant's message.
        tool_call_id: The call whose result a message of the role `tool` contains.
        name: The function whose result it contains.
    """

    role: str
    content: str
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class PartsMessage(TypedDict):
    """A message whose content is a list of parts; otherwise as `Message`. Its texts are joined unless it has images."""

    role: str
    content: list[ContentPart]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


Observation = Message | PartsMessage | list[Message | PartsMessage]
"""What the model reads before its next answer: one message, or several such as the results of several tool calls."""

MESSAGE_KEYS = tuple(Message.__annotations__)


def messages_of(observation: Observation) -> list[Message]:
    """The messages of an environment's observation as a list, also if it is a single message."""
    return cast("list[Message]", [observation] if isinstance(observation, Mapping) else list(observation))


def plain_text(content: Any) -> str:
    """The text of a content, with `[image]` instead of images."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "".join(str(part.get("text", "[image]")) for part in parts)


def text_of(content: Any, what: str) -> str:
    """The text of a message's content: the text itself, or its joined text parts. Errors name the message as `what`.

    Raises:
        DataError: It is neither, or a part is an image.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{what} has the content {format_value(content)}: expected a text or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            is_image = kind in ("image", "image_url", "input_image")
            why = "images are only supported in prompts and training data" if is_image else "only text is supported"
            raise DataError(f"{what} has a part of type {kind!r}: {why}. Remove the part or the row")
        texts.append(part["text"])
    return "".join(texts)


class Record(TypedDict):
    """One row of a dataset.

    Attributes:
        messages: The conversation: {role, content} each, with `tool_calls` in messages that call tools.
        tools: Function definitions that are offered to the model, as returned by `rl_train.data.conversations.read_tools`.
        extra_env_info: Passed to the environment as metadata.
        task_name: Environment that answers and scores the rollout.
        stop_strings: Strings that end a completion.
    """

    messages: list[dict[str, Any]]
    extra_env_info: dict[str, Any]
    task_name: str
    tools: NotRequired[list[dict[str, Any]]]
    stop_strings: NotRequired[list[str]]


class Dataset(ABC):
    """A finite, indexable collection of records; index i always returns the same record.

    A dataset that reads rows from files may also define: `row_location(index)`, the location of a record's row, for errors;
    `prompt_of(index)`, the prompt as written in the row, by which rows are held out; `skipped` and `reasons`, the number of bad
    rows that were left out and why; `firsts`, indices of records that together cover everything a chat template may reject,
    which are checked first.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Record: ...
