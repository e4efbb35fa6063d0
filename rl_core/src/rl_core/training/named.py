"""What a config names by a dotted path, called with its keyword arguments; knows no optimizer and no schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl_core.errors import UserError
from rl_core.plugins.component import did_you_mean


def call(factory: Any, first: Any, kwargs: Mapping[str, Any], *, key: str, also: tuple[str, ...] = ()) -> Any:
    """What `factory(first, **kwargs)` gives.

    Args:
        factory: what `rl_core.plugins.import_path.resolve` found.
        first: its first argument.
        kwargs: those of the config.
        key: the section of the config; errors begin with it.
        also: keywords that were taken out before, for the list of those that there are.

    Raises:
        UserError: it cannot be called, an argument is missing or unknown, or it refuses one.
    """
    if not callable(factory):
        raise UserError(f"`{key}.name`: {factory!r} cannot be called.")
    check_arguments(factory, kwargs, key=key, given=1, also=also)
    try:
        return factory(first, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        name = getattr(factory, "__name__", repr(factory))
        raise UserError(f"`{key}.kwargs`: {name} refuses {dict(kwargs)}: {error}") from error


def check_arguments(
    factory: Callable[..., Any], kwargs: Mapping[str, Any], *, key: str, given: int, also: tuple[str, ...] = ()
) -> None:
    """Refuse keywords that `factory` does not take and ask for those that it needs.

    Args:
        factory: what would be called.
        kwargs: those of the config.
        key: the section of the config; errors begin with it.
        given: arguments that come by position.
        also: as in `call`.

    Raises:
        UserError: one is missing or unknown.
    """
    parameters = list(inspect.signature(factory).parameters.values())[given:]
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters]
        for name in kwargs:
            if name not in names:
                raise UserError(
                    f"`{key}.kwargs.{name}`: {getattr(factory, '__name__', factory)} takes no such argument."
                    f"{did_you_mean(name, [*names, *also])} It takes {', '.join([*names, *also])}."
                )
    named = (p for p in parameters if p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL))
    missing = [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in kwargs]
    if missing:
        raise UserError(f"`{key}.kwargs` lacks {', '.join(missing)}.")
