"""The report page: complete, self-contained, of limited size, and safe for any model output."""

import json
import os
import re
import socket
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from command_line import rlcore

from rl_core.errors import DataError
from rlcore_cli.report.page import ending_of, report
from rlcore_cli.report.run_folder import read_run_folder

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> \" ' & \u2028 {{ 7 * 7 }}"


class Page(HTMLParser):
    """Every element with its attributes, every script's text, and the visible text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.words, self._within = [], {}, [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._within = tag
        if tag == "script":
            self.scripts[len(self.scripts)] = ""

    def handle_endtag(self, tag):
        self._within = None

    def handle_data(self, data):
        if self._within == "script":
            self.scripts[len(self.scripts) - 1] += data
        elif self._within != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split()).replace(" .", ".")

    @property
    def rollouts(self):
        return json.loads(next(text for text in self.scripts.values() if text.startswith("[")))

    def titles(self):
        return [attributes["aria-label"] for tag, attributes in self.elements if tag == "svg"]


@pytest.fixture
def page_of(tmp_path):
    """The page of a run folder, and its text."""

    def make(folder, **options):
        output = tmp_path / "out" / "page.html"
        report(folder, output=output, **({"max_mib": 5.0} | options))
        return Page(output.read_text(encoding="utf-8"))

    return make


def test_the_page_shows_the_curves_the_rollouts_the_config_and_the_versions(write_run, tmp_path, page_of):
    texts = {1: "the", 2: " sum", 3: "<eos>"}
    page = page_of(write_run(tmp_path / "run", texts=texts, metrics=lambda step: {"validation/accuracy": 0.5, "odd/one": step}))
    assert {"Reward", "Validation accuracy", "Entropy", "Time by phase", "odd/one"} <= set(page.titles())
    assert "Finished: 5 of 5 steps." in page.text
    assert "grpo.seed 3 override" in page.text
    assert "sums.yaml:2:3" in page.text
    assert "torch 2" in page.text
    [first, *_] = page.rollouts
    assert first["rows"][1]["pieces"] == ["the", " sum", ["<eos>"]]
    assert first["rows"][1]["logprobs"] == [-0.5, -1.25, -0.125]
    assert (first["rows"][1]["reward"], first["rows"][1]["advantage"], first["prompts"]["0"]) == (1.0, 0.5, "1+1=")


IDLE = {"busy": (0.05, 0.1), "engine": (0.6, 0.1), "trainer": (0.1, 0.6)}
"""Idle fractions of trainer and engine."""


@pytest.mark.parametrize(
    ("idle", "staleness", "environment", "sentence"),
    [
        ("busy", 1, 0.0, "Both sides are busy"),
        ("engine", 0, 0.0, "Sampling and training alternate"),
        ("engine", 1, 0.0, "the engine needs more resources"),
        ("engine", 1, 9.0, "most rollouts wait for the environment: it needs more workers"),
        ("trainer", 1, 0.0, "the policy needs more resources"),
    ],
)
def test_the_page_draws_one_step_and_says_which_side_needs_more_resources(
    write_run, tmp_path, page_of, idle, staleness, environment, sentence
):
    trainer, engine = IDLE[idle]
    folder = write_run(
        tmp_path / "run",
        metrics=lambda step: {"trainer/idle_frac": 1.0 if step == 1 else trainer, "engine/idle_frac": engine},
        config={"rollout": {"max_staleness": staleness}},
    )
    phases = [["refit", 0.0, 1.0], ["rollout", 1.0, 4.0], ["train", 4.0, 8.0]]
    waiting = {"engine": [4.0] * 60, "environment": [environment] * 60}
    timelines = [
        {"step": step, "seconds": seconds, "phases": phases, "waiting": waiting}
        for step, seconds in ((1, 50.0), (2, 9.0), (3, 8.0), (4, 10.0))
    ]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timelines))
    page = page_of(folder)
    assert "Step 2 over time" in page.titles()  # the median without the first
    assert sentence in page.text
    assert f"the trainer waits in {trainer:.0%} of a step, and no rollout waits for the engine in {engine:.0%}" in page.text
    assert ("wait for the environment" in page.text.split("Top: phases")[0]) == bool(environment)
    [readings] = [json.loads(a["data-readings"]) for tag, a in page.elements if tag == "svg" and "over time" in a["aria-label"]]
    assert readings["of"] == "second"
    assert readings["series"][0][2][:2] == [0.075, 0.225]


def test_the_page_has_a_table_of_what_the_prompt_sampler_recorded(write_run, tmp_path, page_of):
    assert "Prompt sampler" not in page_of(write_run(tmp_path / "plain")).text
    recorded = lambda step: {"data/sampler/epochs": step / 8, "data/sampler/share/<sums>": 0.5}  # noqa: E731
    page = page_of(write_run(tmp_path / "run", metrics=recorded))
    assert "Prompt sampler step 1 2 3 4 5 epochs 0.125 0.25 0.375 0.5 0.625 share/<sums> 0.5 0.5 0.5 0.5 0.5" in page.text
    assert "Prompt sampler" in page.titles()


def test_the_page_loads_no_external_resources(write_run, tmp_path):
    folder = write_run(tmp_path / "run")
    report(folder, output=None, max_mib=5.0)
    text = (folder / "report.html").read_text()
    page = Page(text)
    references = [v for _, a in page.elements for k, v in a.items() if k in ("src", "href", "srcset", "data", "action")]
    assert all(value.startswith("#") or value == "data:," for value in references)
    assert not re.search(r"https?:|//cdn|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert {tag for tag, _ in page.elements} & {"iframe", "object", "embed", "base"} == set()


def test_text_of_models_and_configs_is_escaped(write_run, tmp_path, page_of):
    def record(step, row):
        return {
            "group": 0,
            "prompt": HOSTILE,
            "completion": HOSTILE,
            "answer": HOSTILE,
            "expected_answer": HOSTILE,
            "tokens": [1],
            "task": HOSTILE,
            "reward": 1,
        }

    clean = page_of(write_run(tmp_path / "clean", texts={1: "a", 2: "b", 3: "c"}))
    folder = write_run(
        tmp_path / "a <b>&'run",
        texts={1: HOSTILE},
        record=record,
        metrics=lambda step: {f"env/{HOSTILE}/x": 1.0},
        config={"grpo": {"max_num_steps": 5, HOSTILE: HOSTILE}},
        provenance={"file": HOSTILE, "overrides": [HOSTILE], "values": {}},
        environment={"python": HOSTILE, "plugins": {HOSTILE: HOSTILE}},
        status={"state": "failed", "error": HOSTILE},
    )
    page = page_of(folder)
    assert len(page.scripts) == len(clean.scripts)
    assert [page.scripts[i] for i in page.scripts if not page.scripts[i].startswith("[")] == [
        clean.scripts[i] for i in clean.scripts if not clean.scripts[i].startswith("[")
    ]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "img" not in {tag for tag, _ in page.elements}
    [row, *_] = page.rollouts[0]["rows"]
    assert (row["pieces"], row["answer"], page.rollouts[0]["prompts"]["0"]) == ([HOSTILE], HOSTILE, HOSTILE)
    assert row["expected_answer"] == HOSTILE
    assert " ".join(HOSTILE.split()) in page.text


@pytest.mark.parametrize("max_mib", [0.5, 1.0])
def test_the_page_of_a_large_run_keeps_its_size_limit_and_reports_omissions(write_run, tmp_path, page_of, max_mib):
    def record(step, row):
        text = f"{step} {row} " + "word " * 800
        return {
            "group": row // 8,
            "sample": row % 8,
            "prompt": "why? " * 3000,
            "completion": text,
            "tokens": [1] * 2000,
            "reward": 1,
        }

    many = {f"env/task/metric_{index}": 1.0 for index in range(150)}
    folder = write_run(tmp_path / "run", steps=120, rows=16, record=record, metrics=lambda step: many, texts={1: "word "})
    page = page_of(folder, max_mib=max_mib)
    size = (tmp_path / "out" / "page.html").stat().st_size
    assert 0.6 * max_mib * 2**20 < size <= max_mib * 2**20
    steps = [part["step"] for part in page.rollouts]
    rows = [row for part in page.rollouts for row in part["rows"]]
    assert (steps[0], steps[-1]) == (1, 120)
    assert f"The first rollouts of {len(steps)} of 120 logged steps ({len(rows)} rollouts)" in page.text
    assert f"The middle of {len(rows)} long rollouts is omitted" in page.text
    assert all((row["left_out"], row["num_tokens"], len(row["tokens"])) == (500, 2000, 1500) for row in rows)
    assert "Not shown: env/task/metric_" in page.text


def test_a_page_without_space_for_rollouts_says_so(write_run, tmp_path, page_of):
    def record(step, row):
        numbers = {"tokens": list(range(10**6, 10**6 + 1500)), "logprobs": [-0.1234] * 1500}
        return {"group": 0, "prompt": "why", "completion": "w" * 40000, "reward": 1} | numbers

    page = page_of(write_run(tmp_path / "run", record=record, steps=2), max_mib=0.05)
    assert "No rollout fits into 0.05 MiB. The rollouts of 2 steps are in" in page.text


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ({"status": None}, "the run folder has no valid status"),
        ({"config": None}, "The run folder has no config.yaml"),
        ({"provenance": None}, "The origin of the values is unknown"),
        ({"environment": None}, "Versions are unknown"),
        ({"rows": 0}, "The run folder has no rollouts."),
        ({"steps": 0}, "No steps recorded."),
        ({"texts": None}, "The run folder has no token texts, so tokens are shown as ids."),
    ],
)
def test_missing_files_of_a_run_folder_are_reported_and_the_rest_is_shown(write_run, tmp_path, page_of, missing, sentence):
    folder = write_run(tmp_path / "run", **({"texts": {1: "the", 2: " sum", 3: "<eos>"}} | missing))
    assert sentence in page_of(folder).text


def test_a_number_that_is_not_finite_is_marked_on_its_chart(write_run, tmp_path, page_of):
    page = page_of(write_run(tmp_path / "run", metrics=lambda step: {"loss": None if step == 3 else 1.0 / step}))
    assert "Marks at the top: NaN or infinite values." in page.text
    assert sum(attributes.get("class") == "bad" for tag, attributes in page.elements if tag == "path") == 1


def test_an_incomplete_last_line_is_ignored(write_run, tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward/me')
    assert read_run_folder(folder).last_step == 5


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"st', None),
        ("metrics.jsonl", '{"step": 1}\nnonsense\n', "metrics.jsonl:2: invalid JSON"),
        ("metrics.jsonl", '{"reward/mean": 1}\n', "metrics.jsonl:1: the key `step` is missing"),
        ("metrics.jsonl", "[1]\n", "metrics.jsonl:1: must be a JSON object"),
        ("status.json", "{", "status.json is corrupt"),
        ("config.yaml", "- 1", "config.yaml must be a mapping"),
    ],
)
def test_a_damaged_file_is_named(write_run, tmp_path, file, text, message):
    folder = write_run(tmp_path / "run")
    (folder / file).write_text(text)
    if message is None:
        assert read_run_folder(folder).last_step == 1
        return
    with pytest.raises(DataError, match=re.escape(message)):
        read_run_folder(folder)


def test_the_state_of_a_run_follows_from_its_status_and_process(write_run, tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here, elsewhere = {"host": socket.gethostname()}, {"host": "another-machine"}
    running = {"state": "running", "pid": os.getpid()}
    cases = {
        "finished": {"status": {"state": "finished"}},
        "failed": {"status": {"state": "failed", "error": "NaN", "during": "train"}},
        "interrupted": {"status": {"state": "interrupted"}},
        "unknown": {"status": None},
        "running": {"status": running, "environment": here},
        "building": {"status": running | {"state": "building"}, "environment": here},
        "vanished": {"status": running | {"pid": gone.pid}, "environment": here},
    }
    for state, files in cases.items():
        ending = ending_of(read_run_folder(write_run(tmp_path / state, **files)))
        assert (ending.state, ending.is_over) == (state, state not in ("running", "building"))
    unseen = write_run(tmp_path / "unseen", status=running | {"pid": gone.pid}, environment=elsewhere)
    assert ending_of(read_run_folder(unseen)).state == "running"
    resumed = write_run(tmp_path / "resumed", status=running | {"state": "building", "planned_steps": 40})
    assert "of 40 steps" in ending_of(read_run_folder(resumed)).sentence, "its config is written once the models are loaded"
    failed = ending_of(read_run_folder(tmp_path / "failed"))
    assert (failed.sentence, failed.error) == ("Failed in phase train, after 5 of 5 steps.", "NaN")


def test_runs_that_failed_at_startup_or_died_are_reported_as_such(write_run, tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    broken = {"state": "failed", "during": "building", "error": "no column `question`"}
    failed = ending_of(read_run_folder(write_run(tmp_path / "failed", steps=0, status=broken, provenance=None)))
    assert (failed.sentence, failed.error) == ("Failed during startup, after 0 of 0 steps.", "no column `question`")
    # While a run is being resumed, environment.json is from the previous process, possibly on another machine.
    killed = {"state": "building", "pid": gone.pid, "host": socket.gethostname()}
    vanished = ending_of(read_run_folder(write_run(tmp_path / "gone", status=killed, environment={"host": "another-machine"})))
    assert vanished.state == "vanished"
    assert "without an error message" in vanished.sentence


@pytest.mark.parametrize(
    ("status", "environment", "times"),
    [
        (
            {
                "state": "finished",
                "started": "2026-01-02T10:00:00+00:00",
                "ended": "2026-01-02T13:20:05+00:00",
                "seconds": 12005.2,
            },
            {"started": "2026-01-02T10:00:07+00:00"},
            "Started 2026-01-02 10:00:00 UTC, ended 2026-01-02 13:20:05 UTC, took 3 h 20 min.",
        ),
        (
            {"state": "running", "started": "2026-01-02T10:00:00+00:00"},
            {"started": "2026-01-02T10:00:07+00:00"},
            "Started 2026-01-02 10:00:00 UTC.",
        ),
        ({"state": "finished"}, {"started": "2026-01-02T10:00:07+00:00"}, "Started 2026-01-02 10:00:07 UTC."),
        ({"state": "finished"}, {}, ""),
    ],
    ids=["over", "running", "started alone", "silent"],
)
def test_the_page_says_when_a_run_started_and_ended_and_how_long_it_took(
    write_run, tmp_path, page_of, status, environment, times
):
    folder = write_run(tmp_path / "run", status=status, environment=environment)
    ending = ending_of(read_run_folder(folder))
    assert ending.times == times
    text = page_of(folder).text
    assert " ".join(f"{ending.sentence} {times}".split()) in text
    assert ("Started" in text) == bool(times)


def test_a_wrong_path_is_a_user_error(write_run, tmp_path):
    write_run(tmp_path / "runs" / "sums")
    (tmp_path / "file").write_text("")
    for path, message in [
        (tmp_path / "nowhere", "does not exist. Give a run folder"),
        (tmp_path / "file", "is a file. Give a run folder"),
        (tmp_path / "runs", f"Run folders inside it: {tmp_path / 'runs' / 'sums'}."),
    ]:
        result = rlcore("report", path)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr
        assert "Traceback" not in result.stderr


def test_a_page_that_cannot_be_written_is_a_user_error(write_run, tmp_path):
    run = write_run(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "folder", tmp_path / "file" / "page.html"):
        for command in (("report", run), ("compare", run, run)):
            result = rlcore(*command, "--output", output)
            assert (result.returncode, result.stdout) == (2, "")
            assert result.stderr.startswith(f"error: {output} cannot be written: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "run"]


def test_a_path_of_spaces_and_letters_of_any_language_is_a_path(write_run, tmp_path, page_of):
    folder = write_run(tmp_path / "läufe 二" / "sums <b> & more")
    page = page_of(folder)
    assert "sums <b> & more" in page.text
    assert "Finished: 5 of 5 steps." in rlcore("report", folder).stdout


def test_the_page_claims_all_rollouts_only_if_all_are_included(write_run, tmp_path, page_of):
    folder = write_run(tmp_path / "run", steps=3, rows=4)
    assert "All 12 rollouts of the 3 logged steps." in page_of(folder).text

    def long(step, row):
        return {"group": row, "prompt": "why? " * 1000, "completion": "word " * 800, "reward": 1}

    cut = page_of(write_run(tmp_path / "long", steps=3, rows=40, record=long), max_mib=0.5).text
    assert "The first rollouts of" in cut
    assert "of 3 logged steps" in cut
    assert "All 120" not in cut


def test_the_command_prints_where_the_page_is_and_how_the_run_ended(write_run, tmp_path):
    result = rlcore("report", write_run(tmp_path / "run"), "--output", tmp_path / "new" / "page.html")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(
        rf"{re.escape(str(tmp_path))}/new/page\.html \(\d+\.\d KiB\)\. Finished: 5 of 5 steps\.\n", result.stdout
    )


def test_a_report_imports_no_heavy_library(write_run, tmp_path):
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sorted({'torch', 'ray', 'numpy', 'transformers'} & set(sys.modules))))\n"
        f"sys.argv = ['rlcore', 'report', {str(write_run(tmp_path / 'run'))!r}]\n"
        "from rlcore_cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_run_that_logged_no_rollouts_has_none(write_run, tmp_path, page_of):
    folder = write_run(tmp_path / "run")
    for path in (folder / "rollouts").iterdir():
        path.write_text("")
    assert "The run folder has no rollouts." in page_of(folder).text
