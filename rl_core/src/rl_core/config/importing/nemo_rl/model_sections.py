"""Rows for a section that describes another model the way `policy` does: `value` (the critic) and `teacher`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.config.importing.rows import Becomes, Decision, Row, Switch, Theirs


def rows_for(section: str, rows: Sequence[Row]) -> list[Row]:
    """The rows of `policy` for another section; those of `policy.generation` are left out, because only the policy samples."""
    return [_row(section, row) for row in rows if not row.pattern.startswith("policy.generation")]


def switches_for(section: str, switches: Sequence[Switch]) -> list[Switch]:
    """The switches of `policy` for another section."""
    found = [switch for switch in switches if switch.pattern.startswith("policy.") and ".generation" not in switch.pattern]
    return [_switch(section, switch) for switch in found]


def _row(section: str, row: Row) -> Row:
    def decide(value: Any, theirs: Theirs) -> Decision:
        decision = row.decide(value, _as_policy(section, theirs))
        if not isinstance(decision, Becomes):
            return decision
        return Becomes({_renamed(section, key): it for key, it in decision.values.items()}, decision.note)

    return Row(pattern=_renamed(section, row.pattern), decide=decide, whole=row.whole, as_it_is=row.as_it_is)


def _switch(section: str, switch: Switch) -> Switch:
    return Switch(
        pattern=_renamed(section, switch.pattern),
        is_on=lambda theirs: switch.is_on(_as_policy(section, theirs)),
        off=_renamed(section, switch.off),
    )


def _as_policy(section: str, theirs: Theirs) -> Theirs:
    return Theirs({**theirs.values, "policy": theirs.values.get(section)})


def _renamed(section: str, key: str) -> str:
    return f"{section}.{key.removeprefix('policy.')}" if key.startswith("policy.") else key
