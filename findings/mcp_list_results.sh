#!/usr/bin/env bash
# mcp 2.3 (the Python SDK): a tool that returns a list sends one text for each element, texts without quotes. So the `content` of a result,
# which is what clients show to a model, is the same for "a" and ["a"], for 5, "5" and [5], and for [[1], [2]] and [1, 2]; an empty list and None have no
# content at all. Only `structured_content` has the value. A dict is sent as one JSON text. A good guess would be that all values that
# are not texts are sent as JSON, as dicts are and as the specification asks for (one text block with the serialized JSON).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mcp==2.3.0
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import asyncio
import json
from importlib.metadata import version

from mcp import Client
from mcp.server import MCPServer

server = MCPServer("lists")
VALUES: dict[str, tuple[type, object]] = {
    "text": (str, "a"),
    "list_of_a_text": (list[str], ["a"]),
    "empty_list": (list[str], []),
    "numbers": (list[int], [1, 2]),
    "nested": (list[list[int]], [[1], [2]]),
    "lines": (list[str], ["a\nb", "c"]),
    "mapping": (dict[str, list[int]], {"a": [1]}),
}


def tool_for(name, kind, value):
    def function():
        return value

    function.__name__, function.__annotations__ = name, {"return": kind}
    server.tool()(function)


for name, (kind, value) in VALUES.items():
    tool_for(name, kind, value)


async def contents():
    found = {}
    async with Client(server) as client:
        for name in VALUES:
            result = await client.call_tool(name, {})
            found[name] = [block.text for block in result.content]
            print(f"{name}: returned {VALUES[name][1]!r}, content {found[name]}, structured {result.structured_content}")
    return found


print("mcp", version("mcp"))
found = asyncio.run(contents())
assert found["text"] == found["list_of_a_text"] == ["a"]
assert found["empty_list"] == []
assert found["numbers"] == found["nested"] == ["1", "2"]
assert found["lines"] == ["a\nb", "c"]
assert json.loads(found["mapping"][0]) == VALUES["mapping"][1]
PY
