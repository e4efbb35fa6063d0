"""Refuses subclasses that override a private name of our classes, usually by accident."""

from __future__ import annotations

from typing import Any

from rl_core.errors import InvalidComponentError

_OURS = ("rl_core", "rl_backends_base", "rl_train")


class PrivateNames:
    """Base of the classes that plugins derive from: their private names belong to them.

    Raises:
        InvalidComponentError: a subclass in another distribution has one of these names; names both classes.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Compare the names of a subclass with those of its bases."""
        super().__init_subclass__(**kwargs)
        package = cls.__module__.partition(".")[0]
        for base in cls.__mro__[1:]:
            if base.__module__.partition(".")[0] not in _OURS or package in _OURS:
                continue
            for name in sorted(vars(cls).keys() & vars(base).keys()):
                if name.startswith("_") and not name.startswith(("__", "_abc_", "_is_")):
                    raise InvalidComponentError(
                        f"{cls.__module__}.{cls.__qualname__} defines `{name}`, a private name of its base class "
                        f"{base.__module__}.{base.__qualname__}, which would then use it. Rename it."
                    )
