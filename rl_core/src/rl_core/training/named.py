"""Calls what a config names by a dotted path, with keyword arguments from the config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl_core.errors import UserError
from rl_core.plugins.component import did_you_mean


def call_named(factory: Any, first: Any, kwargs: Mapping[str, Any], *, key: str, also: tuple[str, ...] = ()) -> Any:
    """Call `factory(first, **kwargs)`; other arguments as `check_arguments`.

    Raises:
        UserError: it is not callable, an argument is missing or unknown, or it raises on one.
    """
    if not callable(factory):
        raise UserError(f"`{key}.name`: {factory!r} cannot be called: name a class or a function.", key=f"{key}.name")
    check_arguments(factory, kwargs, key=key, num_positional=1, also=also)
    try:
        return factory(first, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        name = getattr(factory, "__name__", repr(factory))
        raise UserError(f"`{key}.kwargs`: {name} rejects {dict(kwargs)}: {error}", key=f"{key}.kwargs") from error


def check_arguments(
    factory: Callable[..., Any], kwargs: Mapping[str, Any], *, key: str, num_positional: int, also: tuple[str, ...] = ()
) -> None:
    """Check that `factory` accepts the keywords and gets those that it needs.

    Args:
        factory: the callable.
        kwargs: keyword arguments from the config.
        key: the config section, for errors.
        num_positional: number of arguments passed by position.
        also: keywords handled elsewhere, for the list of allowed ones.

    Raises:
        UserError: one is missing or unknown.
    """
    parameters = list(inspect.signature(factory).parameters.values())[num_positional:]
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters]
        for name in kwargs:
            if name not in names:
                raise UserError(
                    f"`{key}.kwargs.{name}`: {getattr(factory, '__name__', factory)} takes no such argument."
                    f"{did_you_mean(name, [*names, *also])} It takes {', '.join([*names, *also])}.",
                    key=f"{key}.kwargs.{name}",
                )
    named = (p for p in parameters if p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL))
    missing = [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in kwargs]
    if missing:
        raise UserError(f"`{key}.kwargs` is missing {', '.join(missing)}.", key=f"{key}.kwargs")
