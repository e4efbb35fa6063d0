"""Report and metrics of a real run: everything written is read and documented."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch

from rl_train.config.values import leaves
from rlcore_cli.report.page import ending_of, render
from rlcore_cli.report.rollouts import sample_rollouts
from rlcore_cli.report.run_folder import read_run_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
CORE, TRAIN = ROOT / "rl_core" / "src" / "rl_core", ROOT / "rl_train" / "src" / "rl_train"
RECORDERS = (TRAIN / "algorithms", TRAIN / "rollouts", TRAIN / "weight_sync", CORE / "weights", CORE / "dispatch")
"""The packages that record metrics."""


@pytest.fixture(scope="module")
def run(real_run):
    return read_run_folder(real_run)


def documented():
    """The names of the table's first column, as patterns: `<part>` stands for any text."""
    rows = re.findall(r"^\| (`.+?) \|", PAGE.read_text(), flags=re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    return [re.compile(re.sub(r"<\w+>", ".+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))) for name in names]


@pytest.mark.parametrize("which", ["real_run", "real_sft_run"])
def test_every_metric_of_a_real_run_is_in_the_table(which, request):
    names = read_run_folder(request.getfixturevalue(which)).names()
    assert len(names) > 10
    assert [name for name in names if not any(pattern.fullmatch(name) for pattern in documented())] == []


def test_every_metric_that_the_core_names_is_in_the_table():
    """Metrics that the real runs do not record are found in the source: text of the form `area/quantity`."""
    modules = [path for package in RECORDERS for path in package.glob("**/*.py")] + [TRAIN / "run.py"]
    texts = {
        node.value
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    of_validation = {"kto/accuracy"}  # written as validation/accuracy only
    named = sorted(text for text in texts - of_validation if re.fullmatch(r"[a-z_]+/[a-z_]+", text))
    assert {"reward/mean", "ratio/clipped_frac", "refit/bytes"} <= set(named)
    assert [name for name in named if not any(pattern.fullmatch(name) for pattern in documented())] == []


def test_the_page_of_a_real_run_has_its_curves_and_fits(run):
    page = render(run, ending_of(run), max_mib=1.0)
    assert len(page.encode()) <= 2**20
    for title in (
        "Reward",
        "Validation accuracy",
        "KL to the reference policy",
        "Time by phase",
        "Tokens per second",
        "Peak memory by phase",
    ):
        assert f'aria-label="{title}"' in page
    assert re.search(r"Finished: 4 of 4 steps\. Started [-\d]+ [:\d]+ UTC, ended [-\d]+ [:\d]+ UTC, took \d+ ", page)


def test_every_token_of_a_real_run_has_its_text_and_each_rollout_its_staleness(run):
    sample = sample_rollouts(run, budget_bytes=10**7)
    assert (sample.without_text, sample.shortened, sample.all_steps) == (0, 0, 5)
    for part in json.loads(sample.content):
        records = [json.loads(line) for line in run.rollouts[part["step"]].read_text().splitlines()]
        assert len(part["rows"]) == len(records) == part["total"]
        for row, record in zip(part["rows"], records, strict=True):
            assert "".join(piece for piece in row["pieces"] if isinstance(piece, str)) == record["completion"]
            assert len(row["pieces"]) == len(row["logprobs"]) == len(record["tokens"])
        if part["step"]:
            mean = sum(row["staleness"] for row in part["rows"]) / len(part["rows"])
            assert mean == run.metrics[part["step"]]["staleness/mean"]


def test_the_policy_scored_each_sampled_token_as_the_sampler_did(run):
    records = [json.loads(line) for step in (1, 2, 3, 4) for line in run.rollouts[step].read_text().splitlines()]
    apart = [
        abs(own - sampled)
        for record in records
        for own, sampled in zip(record["policy_logprobs"], record["logprobs"], strict=True)
    ]
    # Both are float32 from one set of weights and are rounded to 1e-6; a neighbouring token would be nats away.
    assert max(apart) < 1e-4
    assert max(-logprob for record in records for logprob in record["logprobs"]) > 0.1


def test_the_run_folder_records_the_origin_of_each_value(run):
    values = run.provenance["values"]
    assert set(values) == {key for key, _ in leaves(run.config)}
    assert values["grpo.max_num_steps"] == {"kind": "override", "source": "override #1 `grpo.max_num_steps=4`"}
    assert values["policy.backend"]["kind"] == "file"
    assert re.search(r"grpo_addition\.yaml:\d+:\d+$", values["policy.backend"]["source"])
    assert values["grpo.seed"]["kind"] == "default"
    assert run.provenance["file"].endswith("sums.yaml")


def test_the_run_folder_records_the_environment(run):
    assert run.environment["distributions"]["torch"] == torch.__version__
    assert run.environment["plugins"]["core"] == "rl-core 0.1.0"
    assert {"python", "platform", "host", "started", "cpus"} <= set(run.environment)


def test_several_loggers_wrote_the_same_run(real_run, run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(real_run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("reward/mean")}
    curve = run.curve("reward/mean")
    assert shown == pytest.approx(dict(zip(curve.steps, curve.values, strict=True)), rel=1e-6)
    assert len(list(real_run.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{real_run}/mlflow.db")
    run_id = (real_run / "mlflow_run_id").read_text()
    recorded = {one.step: one.value for one in client.get_metric_history(run_id, "reward/mean")}
    assert recorded == dict(zip(curve.steps, curve.values, strict=True))
    assert client.get_run(run_id).data.params["grpo.max_num_steps"] == "4"
