"""FrozenLake of TextArena: its maps, the player of the demonstrations, and success from the text of a rollout."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_envs.text_games.textarena import TextArenaEnvironment

Record = Mapping[str, Any]
Messages = list[dict[str, Any]]
STEPS = 8
"""Messages of a game, as in textarena.yaml."""

_DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_LINE = "+-----+-----+-----+-----+\n"


@cache
def _lake() -> TextArenaEnvironment:
    """The game of textarena.yaml. Other tasks do not need its library."""
    from rl_envs.text_games.textarena import TextArenaEnvironment

    return TextArenaEnvironment({"id": "FrozenLake-v0", "kwargs": {"num_holes": 4}, "max_moves": STEPS})


def lakes() -> Iterator[Record]:
    """Each 4x4 map with four holes, with the first seed that gives it."""
    seen = set()
    for seed in range(8000):
        opening = _lake().reset({"seed": seed, "session_id": "map"})["content"]  # type: ignore[index, call-overload]
        if opening not in seen:
            seen.add(opening)
            yield {
                "messages": [{"role": "user", "content": "Write one action."}],
                "extra_env_info": {"seed": seed, "opening": opening},
                "task_name": "textarena",
            }


def _read_lake(text: str) -> dict[tuple[int, int], str]:
    """The cells of the last board in a text: P, H, G or nothing."""
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)[-4:]
    return {(row, column): cell.strip() for row, line in enumerate(rows) for column, cell in enumerate(line.split("|"))}


def _steps_to_goal(cells: Mapping[tuple[int, int], str]) -> dict[tuple[int, int], int]:
    """The length of the shortest way to the goal from each cell that has one."""
    found = {cell: 0 for cell, content in cells.items() if content == "G"}
    queue = list(found)
    for cell in queue:  # which grows
        for down, right in _DIRECTIONS.values():
            near = cell[0] + down, cell[1] + right
            if near not in found and cells.get(near, "H") != "H":
                found[near] = found[cell] + 1
                queue.append(near)
    return found


def cross(record: Record, draw: random.Random) -> Messages:
    """Seven players in twenty take a shortest way around the holes; the others walk right or down, whatever is there."""
    info = {**record["extra_env_info"], "session_id": "demonstration"}
    log: Messages = [*record["messages"], _lake().reset(info)]
    distances = _steps_to_goal(_read_lake(log[-1]["content"]))
    cell, careful, ended = (0, 0), draw.random() < 0.35, False
    while not ended:
        near = {way: (cell[0] + down, cell[1] + right) for way, (down, right) in _DIRECTIONS.items()}
        best = [way for way, to in near.items() if distances.get(to, math.inf) < distances[cell]]
        way = draw.choice(best if careful else [way for way in ("down", "right") if max(near[way]) < 4])
        cell = near[way]
        log.append({"role": "assistant", "content": f"[{way}]"})
        turn = _lake().step([log], [info])  # type: ignore[list-item]
        ended, info = bool(turn.terminateds[0]), turn.metadata[0]
        log.append(turn.observations[0])  # type: ignore[arg-type]
    return log[:-1]


def crossed(prompt: str, completion: str) -> bool:
    """Walks on the map of the prompt: into the goal before a hole, `STEPS` messages, or two steps in a row against the edge."""
    cells, cell, bumps = _read_lake(prompt), (0, 0), 0
    for way in re.findall(r"\[\s*(up|down|left|right)\s*\]", completion)[:STEPS]:
        to = cell[0] + _DIRECTIONS[way][0], cell[1] + _DIRECTIONS[way][1]
        cell, bumps = (to, 0) if to in cells else (cell, bumps + 1)
        if bumps == 2 or cells[cell] in ("H", "G"):
            return cells[cell] == "G"
    return False


def words() -> tuple[str, ...]:
    """Texts of the game that are one token each."""
    return (
        next(lakes())["extra_env_info"]["opening"].partition("+--")[0],
        f"|\n{_LINE}",
        _LINE,
        *(f"|  {cell}  " for cell in " HGP"),
        "\nAvailable Actions: [up], [down], [left], [right], [w], [a], [s], [d]",
        ").\n\nCurrent Board:\n\n",
        " to position (",
        "You moved ",
        *(f"[{way}]" for way in _DIRECTIONS),
    )
