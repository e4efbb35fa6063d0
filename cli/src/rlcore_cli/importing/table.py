"""Reads `nemo_rl.yaml`: the keys of NeMo RL with their outcomes in rlcore and the reasons.

A row has one or more keys, separated by spaces and relative to its sections; `*` matches one component of a key, and `**`
at the end everything below. The first row that matches a key decides, with the first of its cases that applies:

- `kept`, or `-> new.key`: the value is copied. As the only case, it also copies `???`.
- `unless switch`: the key is redundant while that other key is not true.
- `name()`: a function of `conversions`.
- A mapping. `for` (values), `if` (a condition of `conversions`), `equals` (a key with the same value), `matches` (a regular
  expression), `where` and `unless` (values of other keys; `algorithm` is that of the config) say when it applies. The outcome
  is `redundant` or `unsupported` with the reason, or else the value is kept: `to` another key, as `value`, with a `note`.
  With both reasons, the key is redundant for those values and if it is null or empty, and unsupported for all others.

`{section}` and `{name}` are those of the key, and `{algorithm}` is that of the config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlcore_cli.importing import conversions, datasets
from rlcore_cli.importing.foreign import MISSING, Decision, ForeignConfig, Mapped, Redundant, Unsupported

_EMPTY: tuple[Any, ...] = (None, {}, [])


@dataclass(frozen=True, kw_only=True)
class Row:
    """The conversion of the keys that match a pattern.

    Attributes:
        pattern: A dotted key, perhaps with wildcards.
        cases: The first that applies decides.
        whole: Convert the section as one value; the outcome applies to every key in it.
        model: The section that the row is for, of those that describe a model; its pattern and cases are written for `policy`.
    """

    pattern: str
    cases: Sequence[Mapping[str, Any]]
    whole: bool = False
    model: str = "policy"

    @property
    def is_copy(self) -> bool:
        """Whether the value is copied without inspection."""
        return all(case.keys() <= {"to"} for case in self.cases)

    def covers(self, path: Sequence[str]) -> bool:
        """Whether the pattern matches this key."""
        parts = self._named(self.pattern).split(".")
        below = self.whole or parts[-1] == "**"
        parts = parts[:-1] if parts[-1] == "**" else parts
        if len(path) < len(parts) or (len(path) > len(parts) and not below):
            return False
        return all(part in ("*", given) for part, given in zip(parts, path, strict=False))

    def decide(self, path: Sequence[str], value: Any, foreign: ForeignConfig) -> Decision | None:
        """The outcome for a key that the pattern matches; None if no case applies."""
        if self.whole:
            value = foreign.get(self._named(self.pattern))
        if self.model != "policy":
            foreign = ForeignConfig({**foreign.values, "policy": foreign.values.get(self.model)})
        case = next((case for case in self.cases if _applies(case, value, foreign)), None)
        if case is None:
            return None
        decision = self._outcome(case, value, foreign)
        if not isinstance(decision, Mapped):
            return decision
        stars = [part for part, given in zip(path, self.pattern.split("."), strict=False) if given == "*"]
        return Mapped({_filled(self._named(key), stars): it for key, it in decision.values.items()}, decision.note)

    def _outcome(self, case: Mapping[str, Any], value: Any, foreign: ForeignConfig) -> Decision:
        if "call" in case:
            converted: Decision = case["call"](value, foreign)
            return converted
        if "switch" in case:
            return Redundant(f"{self._named(case['switch'])} is disabled")
        if "redundant" in case:
            return Redundant(case["redundant"])
        if "unsupported" in case:
            return Unsupported(case["unsupported"].format(value=value))
        key = case.get("to", self.pattern).format(algorithm=foreign.algorithm)
        return Mapped({key: case.get("value", value)}, case.get("note", ""))

    def _named(self, key: str) -> str:
        return f"{self.model}.{key.removeprefix('policy.')}" if key.startswith("policy.") else key


@dataclass(frozen=True, kw_only=True)
class Table:
    """The import table.

    Attributes:
        sections: Top-level sections of NeMo RL.
        defaults: Defaults of NeMo RL that differ from those of rlcore, by algorithm section.
        switches: Rows that are checked first, for backends and for sections that have no effect while they are disabled.
        rows: The first row that matches a key decides.
    """

    sections: Sequence[str]
    defaults: Mapping[str, Mapping[str, Any]]
    switches: Sequence[Row]
    rows: Sequence[Row]

    def decide(self, key: str, value: Any, foreign: ForeignConfig) -> Decision:
        """The outcome for a key."""
        path = key.split(".")
        for switch in self.switches:
            if switch.covers(path) and (off := switch.decide(path, value, foreign)) is not None:
                return off
        row = next((row for row in self.rows if row.covers(path)), None)
        if row is None:
            return Unsupported("unknown NeMo RL key")
        if value == MISSING and not row.whole and not row.is_copy:
            return Unsupported(f"not set (`{MISSING}`): set it in that config and import again, or set the new key")
        decision = row.decide(path, value, foreign)
        assert decision is not None, f"no case of {row.pattern} applies"
        return decision


@cache
def nemo_rl() -> Table:
    """The keys of NeMo RL 0.6."""
    written = yaml.safe_load(Path(__file__).with_name("nemo_rl.yaml").read_text(encoding="utf-8"))
    whole = written["whole"]
    rows = [row for section, keys in written["rows"].items() for row in _rows(section, keys, whole)]
    rows += [Row(pattern=key, cases=[{"call": conversion}]) for key, conversion in datasets.conversions()]
    return Table(
        sections=written["sections"].split(),
        defaults=written["defaults"],
        switches=_for_models(list(_rows("", written["switches"], whole))),
        rows=_for_models(rows),
    )


def _rows(sections: str, keys: Mapping[str, Any], whole: Sequence[str]) -> Iterator[Row]:
    for section in sections.split() or [""]:
        for names, cases in keys.items():
            for name in names.split() or [""]:
                pattern = f"{section}.{name}".strip(".")
                named = _cases(json.loads(json.dumps(cases).replace("{section}", section).replace("{name}", name)))
                yield Row(pattern=pattern, cases=list(named), whole=pattern in whole)


def _for_models(rows: list[Row]) -> list[Row]:
    """The rows, and those of `policy` for `value` and `teacher`, but not `policy.generation`: only the policy samples."""
    models = [row for row in rows if row.pattern.startswith("policy.") and not row.pattern.startswith("policy.generation")]
    return [*rows, *(replace(row, model=model) for model in ("value", "teacher") for row in models)]


def _cases(written: Any) -> Iterator[Mapping[str, Any]]:
    for case in written if isinstance(written, list) else [written]:
        if isinstance(case, Mapping) and {"redundant", "unsupported"} <= case.keys():
            yield {"for": [*case["for"], *_EMPTY], "redundant": case["redundant"]}
            yield {"unsupported": case["unsupported"]}
        elif isinstance(case, Mapping):
            yield case
        elif case.endswith("()"):
            yield {"call": getattr(conversions, case.removesuffix("()"))}
        elif case.startswith("unless "):
            switch = case.removeprefix("unless ")
            yield {"unless": {switch: True}, "switch": switch}
        else:
            yield {} if case == "kept" else {"to": case.removeprefix("-> ")}


def _applies(case: Mapping[str, Any], value: Any, foreign: ForeignConfig) -> bool:
    condition: Callable[[Any, ForeignConfig], bool] | None = getattr(conversions, case["if"]) if "if" in case else None
    return (
        ("for" not in case or _is_one_of(value, case["for"]))
        and (condition is None or condition(value, foreign))
        and ("equals" not in case or value == foreign.get(case["equals"]))
        and ("matches" not in case or re.search(case["matches"], str(value)) is not None)
        and _hold(case.get("where", {}), foreign)
        and ("unless" not in case or not _hold(case["unless"], foreign))
    )


def _hold(wanted: Mapping[str, Any], foreign: ForeignConfig) -> bool:
    given = {key: foreign.algorithm if key == "algorithm" else foreign.get(key) for key in wanted}
    return all(_is_one_of(given[key], values if isinstance(values, list) else [values]) for key, values in wanted.items())


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    # In Python 1 == True; in a config they differ.
    return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in values)


def _filled(key: str, stars: Sequence[str]) -> str:
    for star in stars:
        key = key.replace("*", star, 1)
    return key
