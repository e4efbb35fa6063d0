"""Finds secrets that `${oc.env:...}` reads into a config, and writes the config without them. Independent of the sections.

A value from the environment is a secret if the variable or the key that it is written under has a secret-looking name, or if
the value is a URL with a password or starts like a well-known token. Everything else from the environment, such as a path,
stays visible. A secret is replaced by the `${...}` that reads it, so that the written config can be loaded again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rl_core.config.diagnostics import KeyPath

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset(
    {"token", "tokens", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential", "credentials"}
    | {"key", "keys", "apikey", "auth", "authorization", "bearer", "cookie", "webhook", "dsn"}
)
_COUNTED = frozenset({"tokens", "keys"})  # `MAX_TOKENS=512` is a count
_URL_WITH_PASSWORD = re.compile(r"[A-Za-z][\w+.-]*://[^/\s:@]*:[^/\s@]+@")
_WELL_KNOWN = re.compile(r"(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|wandb_v1_|eyJ)[\w.-]{8,}")
_LONG_ENOUGH = 6
"""Minimum number of characters of a secret that is searched for inside other texts; shorter ones would match by chance."""
_CUT = 40
"""Number of characters of a secret to search for in errors, which truncate long values."""


class Unresolved(str):
    """The text of an interpolation that replaces a secret; it is not escaped when it is written."""

    __slots__ = ()


@dataclass
class Secrets:
    """The secrets of one config.

    Attributes:
        values: The interpolation that reads each secret, by the secret.
        paths: Where an interpolation that uses a secret is written.
    """

    values: dict[str, str] = field(default_factory=dict)
    paths: set[KeyPath] = field(default_factory=set)

    @contextmanager
    def recording(self, path: KeyPath) -> Iterator[None]:
        """Records what the resolution of the value at `path` reads from the environment."""
        from omegaconf import OmegaConf
        from omegaconf.resolvers import oc

        def read(name: str, *default: Any) -> Any:
            value = oc.env(name, *default)
            if name in os.environ:
                self._take_in(name, value, path)
            return value

        OmegaConf.register_resolver("oc.env", read, replace=True)
        try:
            yield
        finally:
            OmegaConf.register_resolver("oc.env", oc.env, replace=True)

    def redacted(self, resolved: Mapping[str, Any], interpolations: Mapping[KeyPath, str]) -> dict[str, Any]:
        """A copy of a resolved config without secrets.

        Args:
            resolved: The whole config as plain data.
            interpolations: The interpolations, by their path.
        """
        found = self._redacted(resolved, (), interpolations)
        assert isinstance(found, dict)
        return found

    def redact(self, text: str) -> str:
        """A text with its secrets replaced."""
        for secret in sorted(self.values, key=len, reverse=True):
            if len(secret) >= _LONG_ENOUGH:
                text = text.replace(secret, self.values[secret]).replace(secret[:_CUT], self.values[secret])
        return text

    def _take_in(self, name: str, value: Any, path: KeyPath) -> None:
        if isinstance(value, str) and value and is_secret(name, value, path):
            self.values[value] = f"${{oc.env:{name}}}"
            self.paths.add(path)

    def _redacted(self, value: Any, path: KeyPath, interpolations: Mapping[KeyPath, str]) -> Any:
        if path in self.paths and path in interpolations and not isinstance(value, dict | list):
            return Unresolved(interpolations[path])
        match value:
            case dict():
                return {key: self._redacted(item, (*path, key), interpolations) for key, item in value.items()}
            case list() | tuple():
                return [self._redacted(item, (*path, index), interpolations) for index, item in enumerate(value)]
            case str() if value in self.values and any(path[:length] in self.paths for length in range(len(path))):
                return Unresolved(self.values[value])
            case str():
                return self._without_parts(value)
            case _:
                return value

    def _without_parts(self, value: str) -> str:
        parts = [secret for secret in self.values if len(secret) >= _LONG_ENOUGH and secret in value]
        if not parts:
            return value
        pattern = re.compile("|".join(re.escape(secret) for secret in sorted(parts, key=len, reverse=True)))
        text, at = "", 0
        for match in pattern.finditer(value):
            text += escaped(value[at : match.start()]) + self.values[match.group()]
            at = match.end()
        return Unresolved(text + escaped(value[at:]))


def escaped(text: str) -> str:
    """A text that resolves to itself when it is read again."""
    return text if isinstance(text, Unresolved) else text.replace("${", "\\${")


def is_secret(name: str, value: str, path: KeyPath) -> bool:
    """Whether a value that was read from the variable `name`, or is written at `path`, may be a secret; see the module."""
    named = _words(name) | (_words(str(path[-1])) if path else frozenset())
    if _is_number(value):
        named -= _COUNTED
    return bool(named & _SECRET_WORDS) or bool(_URL_WITH_PASSWORD.search(value) or _WELL_KNOWN.match(value))


def _words(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORDS.findall(name))


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
