"""Rows for a section that describes another model the way `policy` does: `value` (the critic) and `teacher`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore_cli.importing.rows import Decision, ForeignConfig, Mapped, Row, Switch


def rows_for(section: str, rows: Sequence[Row]) -> list[Row]:
    """The rows of `policy` for another section; those of `policy.generation` are left out, because only the policy samples."""
    return [_row(section, row) for row in rows if not row.pattern.startswith("policy.generation")]


def switches_for(section: str, switches: Sequence[Switch]) -> list[Switch]:
    """The switches of `policy` for another section."""
    selected = [switch for switch in switches if switch.pattern.startswith("policy.") and ".generation" not in switch.pattern]
    return [_switch(section, switch) for switch in selected]


def _row(section: str, row: Row) -> Row:
    def decide(value: Any, foreign: ForeignConfig) -> Decision:
        decision = row.decide(value, _as_policy(section, foreign))
        if not isinstance(decision, Mapped):
            return decision
        return Mapped({_renamed(section, key): it for key, it in decision.values.items()}, decision.note)

    return Row(pattern=_renamed(section, row.pattern), decide=decide, whole=row.whole, verbatim=row.verbatim)


def _switch(section: str, switch: Switch) -> Switch:
    return Switch(
        pattern=_renamed(section, switch.pattern),
        is_on=lambda foreign: switch.is_on(_as_policy(section, foreign)),
        off=_renamed(section, switch.off),
    )


def _as_policy(section: str, foreign: ForeignConfig) -> ForeignConfig:
    return ForeignConfig({**foreign.values, "policy": foreign.values.get(section)})


def _renamed(section: str, key: str) -> str:
    return f"{section}.{key.removeprefix('policy.')}" if key.startswith("policy.") else key
