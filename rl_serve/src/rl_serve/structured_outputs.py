"""JSON schemas that completions must fit: `response_format`, and limits that keep compiling a schema fast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rl_serve.errors import ApiError

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
