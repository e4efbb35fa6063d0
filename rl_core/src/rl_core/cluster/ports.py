"""Finds a free port on this machine for a rendezvous."""

from __future__ import annotations

import random
import socket

from rl_core.errors import ResourceInsufficientError

# Below Linux's ephemeral range (32768 and up), from which any outgoing connection may take a port meanwhile, and above
# the range of `ray start`'s workers (10002 to 19999).
_LOW, _HIGH = 20_000, 32_000
_returned: set[int] = set()


def free_port(address: str = "") -> int:
    """A port of `address` (empty for every interface) that is free now and that this process has not returned before.

    Raises:
        ResourceInsufficientError: 200 random ports were all taken.
    """
    generator = random.Random()  # seeded by the system, so that drivers of one machine differ
    for _ in range(200):
        port = generator.randrange(_LOW, _HIGH)
        if port in _returned:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        _returned.add(port)
        return port
    raise ResourceInsufficientError(
        f"no free port found between {_LOW} and {_HIGH} in 200 attempts; too many processes listen on this machine: "
        "list them with `ss -ltn` and stop those that are not needed"
    )
