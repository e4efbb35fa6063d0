"""The messages between a session and the agent inside its sandbox. Standard library only; also used inside.

A request is `REQUEST` (operation, seconds, sizes), then the code and the standard input. A reply is `REPLY` (outcome, exit
code, flags, sizes), then stdout and stderr.
"""

from __future__ import annotations

import struct

REQUEST = struct.Struct("!BdII")
REPLY = struct.Struct("!BiBII")
RUN, PROGRAM = 1, 2
OK, ERROR, TIMEOUT, KILLED = 0, 1, 2, 3
TRUNCATED, STATE_LOST = 1, 2
READY = b"R"
"""What the agent sends once, when it has started."""
