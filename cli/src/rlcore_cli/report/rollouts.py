"""Selects rollouts for a report of bounded size: some steps, some rows, and both ends of long rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl_train.data.image_sources import described, described_image, image_parts
from rl_train.metrics.jsonl import iter_jsonl
from rlcore_cli.report.run_folder import RunFolder

MOST_STEPS = 120
FEWEST_STEPS = 4
ROWS_A_STEP = 16
"""Steps are omitted before a step gets fewer rows than this."""
HEAD_TOKENS, TAIL_TOKENS = 1000, 500
HEAD_CHARACTERS, TAIL_CHARACTERS = 4000, 2000
THUMBNAILS_A_STEP = 32
"""Number of different images of a step that are shown."""


_JPEG = "data:image/jpeg;base64,"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The rollouts of a report.

    Attributes:
        content: The rollouts as JSON that is safe inside a script element.
        shown_rows: Number of rollouts in it.
        shown_steps: Number of steps in it.
        all_steps: Number of steps with rollouts in the run folder.
        shortened: Number of rollouts whose middle is omitted.
        without_text: Number of rollouts whose token texts are missing.
        is_whole: Whether all rollouts are included.
    """

    content: str = "[]"
    shown_rows: int = 0
    shown_steps: int = 0
    all_steps: int = 0
    shortened: int = 0
    without_text: int = 0
    is_whole: bool = False


def sample_rollouts(run: RunFolder, *, budget_bytes: int) -> Sample:
    """As many rollouts as fit, from evenly spaced steps including the first and the last.

    Args:
        run: The run.
        budget_bytes: Maximum size of the content.
    """
    steps = sorted(run.rollouts)
    chosen = _evenly(steps, _how_many_steps(run, steps, budget_bytes))
    trained = _optimizer_steps_before(run)
    shown: list[dict[str, Any]] = []
    is_whole = len(chosen) == len(steps)
    left = budget_bytes - 2
    for done, step in enumerate(chosen):
        part, fits = _of_step(run, step, trained.get(step), left // (len(chosen) - done))
        is_whole &= fits
        if part["rows"]:
            shown.append(part)
            left -= len(_compact(part).encode()) + 1
    rows = [row for part in shown for row in part["rows"]]
    return Sample(
        content=_compact(shown),
        shown_rows=len(rows),
        shown_steps=len(shown),
        all_steps=len(steps),
        shortened=sum("left_out" in row for row in rows),
        without_text=sum(row.get("no_text", False) for row in rows),
        is_whole=is_whole,
    )


def listed_rollouts(run: RunFolder) -> Sample:
    """The steps that have rollouts, without the rollouts: the page loads each step when it is shown."""
    steps = sorted(run.rollouts)
    return Sample(content=_compact([{"step": step} for step in steps]), shown_steps=len(steps), all_steps=len(steps))


def rollouts_of_step(run: RunFolder, step: int, *, budget_bytes: int) -> str:
    """The first rollouts of a step that fit, as JSON with the keys of the parts of `Sample.content`."""
    return _compact(_of_step(run, step, _optimizer_steps_before(run).get(step), budget_bytes)[0])


def _how_many_steps(run: RunFolder, steps: Sequence[int], budget_bytes: int) -> int:
    """The number of steps that leaves each about `ROWS_A_STEP` rows, estimated from the first row of the last step."""
    if not steps:
        return 0
    first = next(iter_jsonl(run.rollouts[steps[-1]]), None)
    if first is None:
        return min(len(steps), FEWEST_STEPS)
    size = len(_compact(_row(first, run.token_texts, None)).encode()) + len(_compact(_prompt(first)).encode())
    rows = run.metrics.get(steps[-1], {}).get("rollout/rows") or ROWS_A_STEP
    affordable = int(budget_bytes / (size * min(ROWS_A_STEP, rows)))
    return max(1, min(len(steps), MOST_STEPS, max(FEWEST_STEPS, affordable)))


def _of_step(run: RunFolder, step: int, trained: int | None, budget_bytes: int) -> tuple[dict[str, Any], bool]:
    """The first rows of a step that fit into the budget, their prompts by group, and whether these are all rows.

    `total` is the number of all rows, if known.
    """
    numbers = run.metrics.get(step, {})
    total = numbers.get("rollout/rows", numbers.get("validation/rows"))
    part: dict[str, Any] = {"step": step, "total": total, "prompts": {}, "thumbnails": {}, "rows": []}
    used = len(_compact(part).encode())
    for record in iter_jsonl(run.rollouts[step]):
        row = _row(record, run.token_texts, trained)
        group = str(row["group"])
        prompt = {} if group in part["prompts"] else {group: _prompt(record)}
        new = _thumbnails(record, part["thumbnails"])
        used += len(_compact(row).encode()) + len(_compact([prompt, new]).encode()) + 2
        if used > budget_bytes:
            return part, False
        part["prompts"] |= prompt
        part["thumbnails"] |= new
        part["rows"].append(row)
    return part, True


def _thumbnails(record: Mapping[str, Any], shown: Mapping[str, str]) -> dict[str, str]:
    """Images of a record that a step does not show yet, as `data:` URLs by their digest."""
    images = {part["digest"]: part["path"] for part in image_parts(record.get("messages", ())) if part.get("path")}
    new = {digest: path for digest, path in images.items() if digest not in shown}
    space = THUMBNAILS_A_STEP - len(shown)
    recorded = [each for each in (record.get("thumbnails") or {}).items() if each[0] not in shown]
    found = {digest: _thumbnail(path) for digest, path in [*new.items()][:space]} | dict(recorded[:space])
    return {digest: url for digest, url in [*found.items()][:space] if url.startswith(_JPEG)}


@lru_cache(maxsize=256)
def _thumbnail(path: str) -> str:
    """A small JPEG of a picture as a `data:` URL; empty if the file cannot be read now."""
    from rl_core.errors import DataError  # torch, only for runs with images
    from rl_train.config.data_sections import ImagesConfig
    from rl_train.data.image_sources import ImageSource
    from rl_train.data.images import decoded, thumbnail

    try:
        limits = ImagesConfig()
        return thumbnail(decoded(ImageSource(path).content(limits.max_file_mib << 20), limits))
    except (DataError, ImportError):
        return ""


def _row(record: Mapping[str, Any], texts: Mapping[int, str], trained: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        key: record[key]
        for key in ("task", "sample", "reward", "answer", "expected_answer", "truncated", "turns", "weight_version")
        if record.get(key) is not None
    }
    row["group"] = record.get("group", record.get("index"))
    if list(record.get("reward_parts") or {}) != ["reward"]:
        row["reward_parts"] = record.get("reward_parts") or {}
    messages = record.get("messages", ())
    if record.get("turns", 1) > 1:
        row["messages"] = [
            {"role": message["role"], "content": _shortened(described(message["content"]))} for message in messages
        ]
    if images := image_parts(messages):
        row["images"] = [[part["digest"], described_image(part)] for part in images]
    staleness = record.get("staleness")
    if staleness is None and trained is not None and "weight_version" in row:
        staleness = trained - row["weight_version"]
    if staleness is not None:
        row["staleness"] = staleness
    return row | _tokens(record, texts)


def _tokens(record: Mapping[str, Any], texts: Mapping[int, str]) -> dict[str, Any]:
    """Text, log-probability, ratio and advantage of each token; only both ends of a long row."""
    tokens = record.get("tokens") or []
    completion = str(record.get("completion", ""))
    per_token: dict[str, Sequence[Any]] = {"tokens": tokens}
    pieces = token_pieces(tokens, completion, texts)
    if pieces is not None:
        per_token["pieces"] = [text if is_in else [text] for text, is_in in pieces]
    for key, source in (("logprobs", "logprobs"), ("policy_logprobs", "policy_logprobs"), ("advantages", "advantage")):
        values = record.get(source)
        if isinstance(values, list) and len(values) == len(tokens):
            per_token[key] = [None if value is None else round(value, 4) for value in values]
    fields: dict[str, Any] = {}
    if isinstance(record.get("advantage"), int | float):
        fields["advantage"] = round(record["advantage"], 4)
    if pieces is None:
        fields |= {"completion": _shortened(completion), "no_text": True}
    if len(tokens) > HEAD_TOKENS + TAIL_TOKENS:
        fields["left_out"] = len(tokens) - HEAD_TOKENS - TAIL_TOKENS
        fields["left_out_at"] = HEAD_TOKENS
        per_token = {key: [*values[:HEAD_TOKENS], *values[-TAIL_TOKENS:]] for key, values in per_token.items()}
    return fields | {"num_tokens": len(tokens)} | per_token


def _prompt(record: Mapping[str, Any]) -> str:
    return _shortened(str(record.get("prompt", "")))


def _shortened(text: str) -> str:
    """Both ends of a long text and the number of omitted characters."""
    left_out = len(text) - HEAD_CHARACTERS - TAIL_CHARACTERS
    if left_out <= 0:
        return text
    return f"{text[:HEAD_CHARACTERS]}\n[... {left_out} characters omitted ...]\n{text[-TAIL_CHARACTERS:]}"


def _optimizer_steps_before(run: RunFolder) -> dict[int, int]:
    """The weight version at the start of each step, as far as all earlier steps are recorded."""
    before: dict[int, int] = {0: 0, 1: 0}
    for step in range(1, (run.last_step or 0) + 1):
        steps = run.metrics.get(step, {}).get("num_optimizer_steps")
        if steps is None:
            break
        before[step + 1] = before[step] + int(steps)
    return before


def _evenly(steps: Sequence[int], count: int) -> list[int]:
    if count >= len(steps):
        return list(steps)
    if count == 1:
        return [steps[-1]]
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _compact(value: Any) -> str:
    """JSON that cannot end a script element or open a comment in it, whatever the model wrote."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")


PART_OF_A_CHARACTER = "\ufffd"


def token_pieces(tokens: Sequence[int], completion: str, texts: Mapping[int, str]) -> list[tuple[str, bool]] | None:
    """The text of each token and whether it is part of the completion; None if texts are missing.

    If several tokens form one character, the first gets the text of all and the others get "". Tokens that are not in the
    completion, such as the end of sequence, have their own text and False. If the texts do not add up to the completion, each
    token has its own text.

    Args:
        tokens: [T] ids.
        completion: The decoded text, without special tokens.
        texts: The text of each single id.
    """
    if any(token not in texts for token in tokens):
        return None
    token_texts = [texts[token] for token in tokens]
    pieces: list[tuple[str, bool]] = []
    run_began: int | None = None
    at = 0
    for index, text in enumerate(token_texts):
        if PART_OF_A_CHARACTER in text:
            run_began = index if run_began is None else run_began
            pieces.append(("", True))
            continue
        piece = _find(text, completion, at, is_next=run_began is None)
        if piece is None:
            pieces.append((text, False))
            continue
        start, text = piece
        if run_began is not None:
            pieces[run_began] = (completion[at:start], True)
            run_began = None
        pieces.append((text, True))
        at = start + len(text)
    if run_began is not None:
        pieces[run_began] = (completion[at:], True)
    if "".join(text for text, is_in in pieces if is_in) != completion:
        return [(text, True) for text in token_texts]
    return pieces


def _find(text: str, completion: str, at: int, *, is_next: bool) -> tuple[int, str] | None:
    # Some tokenizers drop the leading space of a word that is decoded alone.
    for candidate in (text, f" {text}"):
        if is_next and completion.startswith(candidate, at):
            return at, candidate
        if not is_next and text:
            start = completion.find(candidate, at)
            if start >= 0:
                return start, candidate
    return None
