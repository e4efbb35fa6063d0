"""Checks what an environment returns. Every error names the task, the class and the invalid value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from rl_core.environments.scorer import StepResult, step_results
from rl_core.errors import DataError, RLCoreError, format_value
from rl_core.event_loop import finished
from rl_core.interfaces.environment import Conversation, EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.records import MESSAGE_KEYS, Message, Observation, text_of
from rl_core.testing.outputs.reserved_names import ENVIRONMENT_METRICS, reserved_reward

_FIELDS = EnvironmentReturn._fields
_REQUIRED = len(_FIELDS) - len(EnvironmentReturn._field_defaults)
_LONGEST_VALUE = 120


def class_name(environment_class: type) -> str:
    """Module and name of a class, as in a config."""
    return f"{environment_class.__module__}.{environment_class.__qualname__}"


def step_checked(
    environment: EnvironmentInterface, task_name: str, message_log_batch: list[Conversation], metadata: list[Any]
) -> list[StepResult]:
    """Call `step` and check its return value with `checked_return`."""
    returned = finished(environment.step(message_log_batch, metadata))
    return checked_return(
        returned, rows=len(message_log_batch), task_name=task_name, environment_class=class_name(type(environment))
    )


def metrics_checked(environment: EnvironmentInterface, task_name: str, batch: Any) -> dict[str, float]:
    """Compute the environment's metrics of a batch, checked by `checked_metrics`."""
    returned = finished(environment.global_post_process_and_metrics(batch))
    _, metrics = checked_metrics(returned, task_name=task_name, environment_class=class_name(type(environment)))
    return metrics


def checked_return(returned: Any, *, rows: int, task_name: str, environment_class: str) -> list[StepResult]:
    """Convert and check the return value of `step` against `EnvironmentReturn`.

    Args:
        returned: the object that `step` returned. A plain tuple or list of the same fields is accepted; numbers may be in lists
            or arrays.
        rows: B, the number of conversations in the call.
        task_name: named in errors.
        environment_class: named in errors.

    Returns:
        The result of each row; its rewards are rounded to float32. Rows with an entry in `failures` are not scored. The content
        of the observations of rows that have not ended is text; text parts are joined.

    Raises:
        RLCoreError: the contract is not met.
    """
    who = f"Environment class {environment_class} of task {task_name!r}"
    if not isinstance(returned, tuple | list) or not _REQUIRED <= len(returned) <= len(_FIELDS):
        size = f" of {len(returned)} values" if isinstance(returned, tuple | list) else ""
        raise RLCoreError(
            f"{who} returned {_kind(returned)}{size} from step(). Return an EnvironmentReturn({', '.join(_FIELDS)}); answers, "
            "scored and failures may be left out."
        )
    step_return = EnvironmentReturn(*returned)
    _check_lists(step_return, who)
    rewards = _rewards(step_return.rewards, who)
    step_return = step_return._replace(rewards=rewards, terminateds=_flags(step_return.terminateds, "terminateds", who))
    if step_return.scored is not None:
        step_return = step_return._replace(scored=_flags(step_return.scored, "scored", who))
    _check_sizes(step_return, rewards, rows, who)
    _check_finite(rewards, who)
    _check_rows(step_return, who)
    results = step_results(step_return._replace(observations=_observations(step_return, who)))
    _check_rewarded(results, who)
    return results


def checked_observation(returned: Any, *, task_name: str) -> Observation:
    """The messages that `reset` returned, with text as content.

    Raises:
        RLCoreError: they are not messages.
    """
    who, what = f"The environment of task {task_name!r}", "observation of reset()"
    if isinstance(returned, tuple | list) and returned:
        return [_message(each, f"message {i} of the {what}", who) for i, each in enumerate(returned)]
    return _message(returned, what, who)


def checked_metrics(returned: Any, *, task_name: str, environment_class: str) -> tuple[Any, dict[str, float]]:
    """The return value of `global_post_process_and_metrics`: the batch, and metrics as floats.

    Raises:
        RLCoreError: it is not a batch and a mapping from names to numbers.
    """
    who = f"Environment class {environment_class} of task {task_name!r}"
    expected = "Return the batch and a dict from names to numbers: `return batch, {'accuracy': 0.5}`."
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not all(isinstance(item, Mapping) for item in returned):
        parts = f" of {', '.join(_kind(item) for item in returned) or 'nothing'}" if isinstance(returned, tuple | list) else ""
        raise RLCoreError(f"{who} returned {_kind(returned)}{parts} from global_post_process_and_metrics(). {expected}")
    batch, metrics = returned
    numbers = {}
    for name, value in metrics.items():
        number = None if isinstance(value, str | bytes) else _converted(partial(float, value))
        if number is None or not isinstance(name, str) or _broken_text(name):
            raise RLCoreError(
                f"{who} returned the metric {_shown(name)}: {_shown(value)} from global_post_process_and_metrics(). {expected}"
            )
        if name in ENVIRONMENT_METRICS:
            raise RLCoreError(
                f"{who} returned the metric {name!r} from global_post_process_and_metrics(), but the runtime reports "
                f"`env/{task_name}/{name}` itself. Choose another name."
            )
        numbers[name] = number
    return batch, numbers


def _check_lists(step_return: EnvironmentReturn, who: str) -> None:
    for name in ("observations", "metadata", "next_stop_strings", "answers", "failures"):
        value = getattr(step_return, name)
        if not isinstance(value, tuple | list) and not (name in ("answers", "failures") and value is None):
            raise RLCoreError(f"{who} returned {_kind(value)} as {name}. Return a list with one entry per row.")


def _rewards(given: Any, who: str) -> dict[str, torch.Tensor]:
    """The rewards [B] by name."""
    if not isinstance(given, Mapping):
        return {"reward": _numbers(given, "rewards", who)}
    for name in given:
        if not isinstance(name, str):
            raise RLCoreError(f"{who} returned a reward named {_shown(name)}. Reward names must be strings.")
    if (problem := reserved_reward(given)) is not None:
        raise RLCoreError(f"{who} returned a reward with a reserved name: {problem}.")
    return {name: _numbers(values, f"the reward {name!r}", who) for name, values in given.items()}


def _check_sizes(step_return: EnvironmentReturn, rewards: Mapping[str, torch.Tensor], rows: int, who: str) -> None:
    sizes = {"rewards" if name == "reward" else name: len(values) for name, values in rewards.items()}
    sizes |= {name: len(value) for name in _FIELDS if name != "rewards" and (value := getattr(step_return, name)) is not None}
    wrong_sizes = {name: size for name, size in sizes.items() if size != rows}
    if wrong_sizes:
        raise RLCoreError(
            f"{who} was called with {rows} rows but returned "
            + ", ".join(f"{size} {name}" for name, size in wrong_sizes.items())
            + ". Every field of an EnvironmentReturn has one entry per row, in row order."
        )


def _check_finite(rewards: Mapping[str, torch.Tensor], who: str) -> None:
    for name, values in rewards.items():
        for row in (~values.isfinite()).nonzero().flatten().tolist()[:1]:
            raise RLCoreError(
                f"{who} returned the {'' if name == 'reward' else 'reward '}{name} {float(values[row])} for row {row}. A "
                "reward is a finite number: set `scored` to 0 for a row that cannot be scored."
            )


def _check_rewarded(results: Sequence[StepResult], who: str) -> None:
    """Check that there are rewards if a scored row ends; turns before the last one may have none."""
    for row, result in enumerate(results):
        if result.terminated and result.scored and not result.rewards:
            raise RLCoreError(
                f"{who} returned {{}} as rewards, so row {row}, which ends and is scored, has none. Return a tensor [B], or "
                "named rewards, or set `scored` to 0 for rows that cannot be scored."
            )


def _check_rows(step_return: EnvironmentReturn, who: str) -> None:
    for row, stops in enumerate(step_return.next_stop_strings):
        if stops is not None:
            _check_stop_strings(stops, row, who)
    for row, answer in enumerate(step_return.answers or ()):
        if answer is not None:
            _check_text(answer, f"answer of row {row}", who, "Return text, or None if no answer was found.")
    for row, failure in enumerate(step_return.failures or ()):
        if failure is not None:
            _check_text(failure, f"failure of row {row}", who, "Return the reason as text, or None if the row has not failed.")


_OBSERVATION = "Return {'role': 'environment', 'content': text}, or a list of such messages, for each row that has not ended."
"""What to return instead of a wrong observation."""


def _observations(step_return: EnvironmentReturn, who: str) -> list[Any]:
    """The observations with text as content; that of a terminated row is ignored and stays as it is."""
    ended = step_return.terminateds.tolist()
    messages: list[Any] = []
    for row, observation in enumerate(step_return.observations):
        if ended[row]:
            messages.append(observation)
        elif isinstance(observation, tuple | list):
            if not observation:
                raise RLCoreError(f"{who} returned an empty list as observation of row {row}. {_OBSERVATION}")
            messages.append(
                [_message(each, f"message {i} of the observation of row {row}", who) for i, each in enumerate(observation)]
            )
        else:
            messages.append(_message(observation, f"observation of row {row}", who))
    return messages


def _message(message: Any, what: str, who: str) -> Message:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        description = f"a mapping of {sorted(map(str, message))}" if isinstance(message, Mapping) else _shown(message)
        raise RLCoreError(f"{who} returned {description} as {what}. {_OBSERVATION}")
    if unknown := sorted(map(str, message.keys() - set(MESSAGE_KEYS))):
        raise RLCoreError(
            f"{who} returned the unknown keys {', '.join(unknown)} in the {what}. A message has {', '.join(MESSAGE_KEYS)}."
        )
    checked = {key: value for key, value in message.items() if value is not None or key in ("role", "content")}
    try:
        if isinstance(checked["content"], list):
            checked["content"] = _parts(checked["content"], f"the {what}")
    except DataError as error:
        raise RLCoreError(f"{who} returned a message that cannot be read: {error}. {_OBSERVATION}") from error
    for key in checked.keys() - {"tool_calls"}:
        if key != "content" or not isinstance(checked[key], list):  # parts with images
            _check_text(checked[key], f"{key} of the {what}", who, _OBSERVATION)
    if "tool_calls" in checked or ("tool_call_id" in checked and checked["role"] != "tool"):
        key = "tool_calls" if "tool_calls" in checked else "tool_call_id"
        owner = "the model's messages" if key == "tool_calls" else "messages of the role 'tool'"
        raise RLCoreError(f"{who} returned {key} in the {what}, whose role is {checked['role']!r}: only {owner} have {key}.")
    return cast("Message", checked)


def _parts(content: list[Any], what: str) -> Any:
    """The joined texts of a content; its parts if it has images, each as a `data:` URL.

    Raises:
        DataError: a part is neither a text nor such an image.
    """
    images = [part for part in content if isinstance(part, Mapping) and part.get("type") == "image_url"]
    for part in images:
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else None
        if not isinstance(url, str) or not url.startswith("data:"):
            raise DataError(f"{what} has an image {format_value(url)}: expected its file as `data:image/png;base64,...`")
    if not images:
        return text_of(content, what)
    return [
        {"type": "image_url", "image_url": {"url": part["image_url"]["url"]}}
        if part in images
        else {"type": "text", "text": text_of([part], what)}
        for part in content
    ]


def _check_stop_strings(stops: Any, row: int, who: str) -> None:
    form = "Return None or a list of non-empty strings."
    if not isinstance(stops, tuple | list):
        raise RLCoreError(f"{who} returned {_shown(stops)} as next_stop_strings of row {row}. {form}")
    for stop in stops:
        _check_text(stop, f"stop string of row {row}", who, form)
        if not stop:
            raise RLCoreError(f"{who} returned an empty stop string for row {row}. {form}")


def _check_text(value: Any, what: str, who: str, form: str) -> None:
    if not isinstance(value, str):
        raise RLCoreError(f"{who} returned {_shown(value)} as {what}. {form}")
    if (broken := _broken_text(value)) is not None:
        raise RLCoreError(
            f"{who} returned {what} with {broken}, half of a surrogate pair: it cannot be tokenized or written as "
            "UTF-8. Repair the text before returning it, for example with text.encode(errors='replace').decode()."
        )


def _broken_text(text: str) -> str | None:
    """The first lone surrogate of a text and its position, or None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start]!r} at position {error.start}"
    return None


def _numbers(values: Any, what: str, who: str) -> torch.Tensor:
    """Values [B] as float32 in CPU memory."""
    tensor = _converted(lambda: torch.as_tensor(values))
    if tensor is None or tensor.is_complex():
        rows = enumerate(values if isinstance(values, tuple | list) else ())
        wrong = (f"; row {row} has {_shown(value)}" for row, value in rows if _converted(partial(_number, value)) is None)
        raise RLCoreError(f"{who} returned {_shown(values)} as {what}{next(wrong, '')}. Return a number for each row.")
    if tensor.dim() != 1:
        raise RLCoreError(f"{who} returned a tensor of shape {list(tensor.shape)} as {what}. Return one number per row: [B].")
    numbers: torch.Tensor = tensor.detach().to(device="cpu", dtype=torch.float32)
    return numbers


def _number(value: Any) -> Any:
    return torch.as_tensor(value).item()


def _flags(values: Any, what: str, who: str) -> torch.Tensor:
    """Values [B] that are 0 or 1, as bool in CPU memory."""
    numbers = _numbers(values, what, who)
    for row in ((numbers != 0) & (numbers != 1)).nonzero().flatten().tolist()[:1]:
        raise RLCoreError(f"{who} returned {what} {float(numbers[row]):g} for row {row}. Return 1 (or True) or 0 (or False).")
    return numbers != 0


def _converted(convert: Callable[[], Any]) -> Any:
    """The converted value, or None if it cannot be converted."""
    try:
        return convert()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _shown(value: Any) -> str:
    """A value in an error, cut if it is long."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > _LONGEST_VALUE:
        value = value[:_LONGEST_VALUE]
    text = _converted(lambda: repr(value)) or _kind(value)  # an integer of more than 4,300 digits has no repr
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
