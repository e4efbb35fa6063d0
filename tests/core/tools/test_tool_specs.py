"""Python functions as tools: schema from signature and docstring, validation of arguments, refused functions."""

import dataclasses
import enum
from typing import Literal

import pytest
import torch
from pydantic import BaseModel

from rl_core.errors import ConfigError
from rl_core.tools import Tool
from rl_core.tools.specs import ToolArgumentError


class Unit(enum.Enum):
    METRIC = "metric"
    IMPERIAL = "imperial"


@dataclasses.dataclass
class Place:
    city: str
    country: str = "CH"


class Window(BaseModel):
    title: str
    days: list[int]


def forecast(
    place: Place,
    json: str,
    window: Window,
    hours: int = 24,
    unit: Unit = Unit.METRIC,
    mode: Literal["short", "long"] = "short",
    model: str | None = None,
) -> str:
    """Forecasts the weather.

    It is always right.

    Args:
        place: Where,
            precisely.
        json (str): Text: any.
        hours: How far ahead.

    Returns:
        The weather.
    """
    return f"{place.city} {hours} {unit.value} {mode} {model} {window.days}"


def test_the_schema_of_a_tool_comes_from_its_signature_and_docstring():
    spec = Tool.of(forecast).spec
    assert spec["type"] == "function"
    function = spec["function"]
    assert (function["name"], function["description"]) == ("forecast", "Forecasts the weather.\n\nIt is always right.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "place": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "country": {"type": "string", "default": "CH"}},
                "required": ["city"],
                "description": "Where, precisely.",
            },
            "json": {"type": "string", "description": "Text: any."},
            "window": {
                "type": "object",
                "properties": {"title": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
                "required": ["title", "days"],
            },
            "hours": {"type": "integer", "default": 24, "description": "How far ahead."},
            "unit": {"type": "string", "enum": ["metric", "imperial"]},
            "mode": {"type": "string", "enum": ["short", "long"], "default": "short"},
            "model": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["place", "json", "window"],
    }


def test_arguments_are_converted_to_the_types_of_the_parameters():
    tool = Tool.of(forecast)
    given = {
        "place": {"city": "Bern"},
        "json": "{}",
        "window": {"title": "w", "days": ["1", 2]},
        "hours": "3",
        "unit": "imperial",
    }
    read = tool.read(given)
    assert read == {
        **given,
        "place": Place("Bern"),
        "window": Window(title="w", days=[1, 2]),
        "hours": 3,
        "unit": Unit.IMPERIAL,
    }
    assert tool.function(**read) == "Bern 3 imperial short None [1, 2]"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hours": "soon"}, "hours: Input should be a valid integer"),
        ({"place": None}, "place: "),
        ({"day": 1}, "day: Extra inputs are not permitted"),
        ({"mode": "middle"}, "mode: Input should be 'short' or 'long'"),
    ],
)
def test_wrong_arguments_are_refused_with_the_parameter_and_the_reason(change, says):
    given = {"place": {"city": "Bern"}, "json": "", "window": {"title": "", "days": []}}
    with pytest.raises(ToolArgumentError) as error:
        Tool.of(forecast).read({**given, **change})
    assert says in str(error.value)


def test_a_missing_argument_is_named():
    with pytest.raises(ToolArgumentError, match="place: Field required; window: Field required"):
        Tool.of(forecast).read({"json": "a"})


class Tree(BaseModel):
    children: list["Tree"]


def untyped(a):
    """No hint."""


def star(*args: int): ...


def tensor(a: torch.Tensor): ...


def recursive(tree: Tree): ...


def unknown(a: "NoSuchType"): ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (untyped, "parameter 'a' of the tool 'untyped' has no type hint"),
        (star, r"parameter '\*args: int', but models pass arguments by name"),
        (
            tensor,
            "parameter 'a' of the tool 'tensor' has the type <class 'torch.Tensor'>, which JSON schema cannot describe",
        ),
        (recursive, "type 'Tree' of a tool's parameter contains itself"),
        (unknown, "type hints of the tool 'unknown' cannot be read: name 'NoSuchType' is not defined"),
        (lambda: 1, "cannot be a tool"),
    ],
    ids=["no hint", "star", "no schema", "recursive", "unknown name", "lambda"],
)
def test_a_function_that_cannot_be_a_tool_is_refused_with_the_reason(function, says):
    with pytest.raises(ConfigError, match=says):
        Tool.of(function)
