"""An MCP server for tests, over stdio: `python mcp_example_server.py`, or over HTTP: `... PORT`."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("example")
notes: list[str] = []


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def remember(note: str) -> str:
    """Remembers a note and returns all of them."""
    notes.append(note)
    return f"{notes} {os.environ.get('GREETING')} {os.environ.get('SECRET_OF_THE_TRAINER')}"


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ToolError("out of stock")


@server.tool()
def sleep() -> str:
    """Does not finish."""
    time.sleep(600)
    return "awake"


@server.tool()
def crash() -> str:
    """Ends the server."""
    print("a fatal error", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def count(end: int) -> list[str]:
    """Counts up to a number."""
    return [str(number) for number in range(end)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
