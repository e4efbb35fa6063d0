"""The messages between a session and the agent inside its sandbox. Standard library only; also used inside.

A request is `REQUEST` (operation, seconds, sizes), then the code and the standard input. A reply is `REPLY` (outcome, exit
code, flags, sizes), then stdout and stderr. Between the header and the code of `LINKED`, which is a `PROGRAM`, is one byte that
carries the two descriptors of the program's link.
"""

from __future__ import annotations

import struct

REQUEST = struct.Struct("!BdII")
REPLY = struct.Struct("!BiBII")
RUN, PROGRAM, LINKED, PRELOAD = 1, 2, 3, 4
OK, ERROR, TIMEOUT, KILLED = 0, 1, 2, 3
TRUNCATED, STATE_LOST = 1, 2
LINK = b"L"
"""The byte that carries the descriptors of a link."""
READY = b"R"
"""What the agent sends once, when it has started."""
