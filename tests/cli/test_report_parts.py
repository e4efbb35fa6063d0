"""Components of a report: charts show the recorded values, and token texts add up to the completion."""

import base64
import io
import json
import random
import re
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rl_train.data.images import thumbnail
from rl_train.metrics.jsonl import iter_jsonl
from rlcore_cli.report.chart import Line, format_number, line_chart, moving_mean, nice_ticks, padded_range, stacked_chart, thin
from rlcore_cli.report.panels import PANELS, better, choose_panels
from rlcore_cli.report.rollouts import sample_rollouts, token_pieces
from rlcore_cli.report.run_folder import read_run_folder


def axis(svg, kind):
    """The scale of an axis, derived from its labels: a function from pixels to values."""
    place = {"left": r'y="([-\d.]+)" class="left"', "below": r'x="([-\d.]+)" y="[\d.]+" class="below"'}[kind]
    labels = [(float(pixel), float(text)) for pixel, text in re.findall(rf"<text [^>]*?{place}>([-\d.e]+)</text>", svg)]
    (pixel, value), (other_pixel, other_value) = labels[0], labels[-1]
    shift = 4 if kind == "left" else 0
    return lambda at: value + (at - pixel + shift) * (other_value - value) / (other_pixel - pixel)


@pytest.mark.parametrize(
    "values", [[0.1, 0.9, 0.4, 0.6], [-3.0, 5.0, 40.0, 17.0], [2e-13, 1e-13, 9e-13, 0.0], [1e7, 3e7, 2e7, 4e7]]
)
def test_chart_lines_are_at_the_positions_of_their_axes(values):
    steps = [0, 10, 25, 40]
    svg = line_chart([Line(label="a", steps=steps, values=values, colour=0)], title="t")
    [points] = re.findall(r'<polyline class="c0" points="([^"]+)"', svg)
    across, up = axis(svg, "below"), axis(svg, "left")
    spread = max(values) - min(values)
    for point, step, value in zip(points.split(), steps, values, strict=True):
        x, y = map(float, point.split(","))
        # Points and labels are rounded to a tenth of a pixel, of 170 in all.
        assert across(x) == pytest.approx(step, abs=0.2)
        assert up(y) == pytest.approx(value, abs=0.005 * spread)


def test_the_numbers_of_an_axis_differ_if_the_values_differ_by_rounding():
    svg = line_chart([Line(label="a", steps=[1, 2, 3], values=[1 - 1e-7, 1.0, 1 + 2e-7], colour=0)], title="t")
    labels = re.findall(r'class="left">([^<]+)<', svg)
    assert len(labels) >= 2
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("low", [-0.002, -0.00125, -1.25e-13, -123456.0, 0.9999])
def test_the_numbers_of_an_axis_lie_within_the_drawing(low):
    values = [low, low + abs(low) * 0.6, low + abs(low) * 0.5]
    svg = line_chart([Line(label="a", steps=[1, 2, 3], values=values, colour=0)], title="t")
    labels = re.findall(r'<text x="([\d.]+)" [^>]*class="left">([^<]+)<', svg)
    assert len(labels) >= 2
    # Ems of DejaVu Sans, the widest font that the style sheet names, at its 11.5 pixels.
    ems = {".": 0.318, "-": 0.361, "e": 0.615}
    for right, text in labels:
        assert 11.5 * sum(ems.get(character, 0.636) for character in text) <= float(right), text


def test_a_chart_of_one_step_has_no_step_before_the_first():
    svg = line_chart([Line(label="a", steps=[0], values=[0.5], colour=0)], title="t")
    assert re.findall(r'class="below">([^<]+)<', svg) == ["0", "1"]


def test_the_bars_of_a_stacked_chart_have_the_heights_of_their_values():
    svg = stacked_chart([1, 2], [("a", [1.0, 2.0], 0), ("b", [3.0, 0.0], 1)], title="t")
    heights = {}
    for colour, height in re.findall(r'<rect class="(c\d)"[^>]*? height="([\d.]+)"', svg):
        heights.setdefault(colour, []).append(float(height))
    unit = heights["c0"][0]
    assert heights["c0"] == pytest.approx([unit, 2 * unit], abs=0.2)
    assert heights["c1"] == pytest.approx([3 * unit], abs=0.2)


def test_a_stacked_chart_of_many_steps_shows_the_mean_of_each_stretch():
    steps = list(range(600))
    svg = stacked_chart(steps, [("a", [float(step % 10) for step in steps], 0)], title="t")
    heights = [float(height) for height in re.findall(r'<rect [^>]*? height="([\d.]+)"', svg)]
    assert len(heights) == 60
    assert max(heights) - min(heights) < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_a_thinned_curve_keeps_its_extremes_and_its_order(seed):
    values = [random.Random(f"{seed} {index}").gauss(0, 1) for index in range(500 + 37 * seed)]
    steps, kept = thin(range(len(values)), values, most=100)
    assert 50 <= len(kept) <= 100
    assert (min(kept), max(kept)) == (min(values), max(values))
    assert steps == sorted(set(steps))
    assert [values[step] for step in steps] == kept


def test_the_moving_mean_is_the_mean_of_the_values_around():
    values = [float(value**2 % 17) for value in range(40)]
    expected = [statistics.fmean(values[max(0, i - 2) : i + 3]) for i in range(40)]
    assert moving_mean(values, 5) == pytest.approx(expected, rel=1e-12)


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
@settings(max_examples=200, deadline=None)
def test_ticks_are_round_few_and_within_their_range(low, width):
    high = low + width
    if not low < high or width < 1e-6 * abs(low):
        return
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 9
    assert all(low - 1e-9 * width <= tick <= high + 1e-9 * width for tick in ticks)


def test_an_axis_is_never_empty_and_starts_at_0_if_values_are_close_to_it():
    assert padded_range([0.0, 0.0]) == (0.0, 1.0)
    assert padded_range([2.0]) == (1.8, 2.2)
    assert padded_range([1.0, 1.0]) == (0.0, 1.05), "a share that is always 1"
    assert padded_range([0.1, 1.0])[0] == 0.0
    assert 0.89 < padded_range([0.9, 1.0])[0] < 0.9


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (0.86328125, "0.8633"),
        (9.34e-14, "9.34e-14"),
        (1e-6, "1e-6"),
        (5.71e-4, "5.71e-4"),
        (-0.0021, "-0.0021"),
        (8539.4, "8539"),
        (12345.6, "12346"),
        (1000000, "1e6"),
        (40, "40"),
    ],
)
def test_numbers_are_written_short(value, text):
    assert format_number(value) == text


@pytest.fixture(scope="module")
def byte_level():
    """A real tokenizer that splits rare characters into bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the sum of two sums is a sum"] * 20, trainer)
    return tokenizer


@given(st.text(max_size=40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_texts_of_tokens_add_up_to_the_completion_of_a_byte_level_tokenizer(byte_level, text, ends):
    tokens = byte_level.encode(text).ids + ([0] if ends else [])
    texts = {token: byte_level.decode([token], skip_special_tokens=False) for token in tokens}
    completion = byte_level.decode(tokens)
    pieces = token_pieces(tokens, completion, texts)
    assert len(pieces) == len(tokens)
    if "\ufffd" not in completion:
        assert "".join(piece for piece, is_in in pieces if is_in) == completion
        assert (not ends) or pieces[-1] == ("<eos>", False)


def test_a_space_that_a_tokenizer_drops_from_a_lone_token_is_found_in_the_completion():
    assert token_pieces([1, 2], "a b", {1: "a", 2: "b"}) == [("a", True), (" b", True)]


def test_without_all_token_texts_there_are_no_pieces():
    assert token_pieces([1, 2], "a b", {1: "a"}) is None


def test_staleness_is_how_many_optimizer_steps_the_policy_was_ahead(write_run, tmp_path):
    def record(step, row):
        return {"group": 0, "tokens": [], "reward": 0, "weight_version": max(0, 2 * (step - 1) - row)}

    run = read_run_folder(write_run(tmp_path / "run", record=record, rows=3))
    parts = {part["step"]: part for part in json.loads(sample_rollouts(run, budget_bytes=10**6).content)}
    assert [row["staleness"] for row in parts[5]["rows"]] == [0, 1, 2]


def test_log_probabilities_of_policy_and_sampler_are_both_kept(write_run, tmp_path):
    def record(step, row):
        own = {"tokens": [1, 2], "logprobs": [-1.0, -2.0], "policy_logprobs": [-1.5, -2.0], "advantage": [0.5, -0.5]}
        return {"group": 0, "reward": 0} | own

    run = read_run_folder(write_run(tmp_path / "run", record=record, steps=1, rows=1))
    [row] = json.loads(sample_rollouts(run, budget_bytes=10**6).content)[0]["rows"]
    assert (row["policy_logprobs"], row["advantages"]) == ([-1.5, -2.0], [0.5, -0.5])


def test_every_metric_is_on_a_chart_or_named_as_left_out():
    names = ["reward/mean", "loss", *(f"env/t/{index}" for index in range(100))]
    main, further, unseen = choose_panels(names)
    assert sorted([n for chosen in (*main, *further) for n in chosen.names] + unseen) == sorted(names)
    assert unseen


def test_every_metric_has_one_panel_and_directions_are_stated():
    patterns = [pattern for panel in PANELS for pattern in panel.metrics]
    assert len(patterns) == len(set(patterns))
    assert (better("validation/accuracy"), better("validation/loss"), better("entropy/sampled")) == ("higher", "lower", None)


def test_a_last_line_that_is_cut_within_a_character_is_skipped(tmp_path):
    path = tmp_path / "token_texts.jsonl"
    path.write_bytes('{"text": "\N{EURO SIGN}"}\n{"text": "\N{EURO SIGN}'.encode()[:-1])
    assert list(iter_jsonl(path)) == [{"text": "\N{EURO SIGN}"}]


def image_record(folder):
    """A rollout of two turns whose prompt has an image in a file, one in the row, and one whose file is gone."""
    sizes = {"width": 300, "height": 200}
    parts = [
        {"type": "image", "path": str(folder / "1.png"), "digest": "a" * 32, **sizes},
        {"type": "image", "digest": "b" * 32, **sizes},
        {"type": "image", "path": str(folder / "gone.png"), "digest": "c" * 32, **sizes},
        {"type": "text", "text": "Which color?"},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]
    return {
        "group": 0,
        "reward": 0,
        "tokens": [],
        "turns": 2,
        "prompt": "[image][image][image]Which color?",
        "messages": messages,
    }


def test_images_of_rollouts_have_thumbnails_with_names_sizes_and_digests(write_run, tmp_path):
    Image.new("RGB", (300, 200), (200, 10, 10)).save(tmp_path / "1.png")
    run = read_run_folder(write_run(tmp_path / "run", record=lambda step, row: image_record(tmp_path), steps=1, rows=3))
    [part] = json.loads(sample_rollouts(run, budget_bytes=10**6).content)
    assert part["rows"][0]["images"] == [
        ["a" * 32, "1.png, 300 x 200 pixels, digest aaaaaaaa"],
        ["b" * 32, "no file, 300 x 200 pixels, digest bbbbbbbb"],
        ["c" * 32, "gone.png, 300 x 200 pixels, digest cccccccc"],
    ]
    assert part["rows"][0]["messages"][0]["content"].startswith(
        "[image: 1.png, 300 x 200 pixels, digest aaaaaaaa][image: no file,"
    )
    [(digest, url)] = part["thumbnails"].items()
    picture = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
    assert (digest, picture.size) == ("a" * 32, (96, 64))
    assert max(abs(a - b) for a, b in zip(picture.getpixel((50, 30)), (200, 10, 10), strict=True)) < 8


def test_recorded_thumbnails_of_images_without_a_file_are_shown_if_they_are_pictures(write_run, tmp_path):
    small = thumbnail(Image.new("RGB", (300, 200), (200, 10, 10)))
    recorded = {"b" * 32: small, "d" * 32: "https://example.com/tracker.png"}
    run = write_run(
        tmp_path / "run", record=lambda step, row: image_record(tmp_path) | {"thumbnails": recorded}, steps=1, rows=3
    )
    [part] = json.loads(sample_rollouts(read_run_folder(run), budget_bytes=10**6).content)
    assert part["thumbnails"] == {"b" * 32: small}
    picture = Image.open(io.BytesIO(base64.b64decode(small.removeprefix("data:image/jpeg;base64,"))))
    assert picture.size == (96, 64)


def test_the_thumbnails_of_a_report_are_bounded_in_number_and_size(write_run, tmp_path):
    def record(step, row):
        path = tmp_path / f"{row}.png"
        Image.effect_noise((400, 400), 200).save(path)
        part = {"type": "image", "path": str(path), "digest": f"{row:032}", "width": 400, "height": 400}
        return {"group": row, "reward": 0, "tokens": [], "messages": [{"role": "user", "content": [part]}]}

    run = read_run_folder(write_run(tmp_path / "run", record=record, steps=1, rows=40))
    [part] = json.loads(sample_rollouts(run, budget_bytes=10**6).content)
    assert (len(part["rows"]), len(part["thumbnails"])) == (40, 32)
    content = sample_rollouts(run, budget_bytes=50_000).content
    assert len(content.encode()) <= 50_000
    assert 0 < len(json.loads(content)[0]["thumbnails"]) < 32
