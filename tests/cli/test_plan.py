"""`rlcore plan`: memory by process, overrides that were tried, measured steps, exit codes; the warning of `rlcore train`."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import marked_processes
import pytest
from command_line import rlcore

import rlcore_cli.plan
from rl_core.errors import ConfigError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.files import parse_size
from rl_train.plan import suggestions, time_plan
from rl_train.plan.microbatches import microbatch, prompts_in, with_shared_prefixes
from rl_train.plan.planner import plan_memory
from rl_train.plan.time_plan import GPUS, plan_time

EXAMPLES = Path(__file__).parents[2] / "examples"
GRPO = EXAMPLES / "grpo_addition.yaml"
MODEL = EXAMPLES / "addition" / "model"
IN_PROCESS = "cluster.backend=in_process"


def plan(*arguments):
    """Exit code and JSON of the command."""
    result = rlcore("plan", GRPO, *arguments, "--json")
    assert all(line.startswith(("tracing", "the run does not fit", "starting the run")) for line in result.stderr.splitlines())
    return result.returncode, json.loads(result.stdout)


def test_the_quickstart_is_planned_by_process_and_phase():
    code, planned = plan("--memory", "24GiB")
    assert (code, planned["fits"], planned["suggestion"]) == (0, True, None)
    processes = {process["name"]: process for process in planned["processes"]}
    assert list(processes) == ["driver", "policy", "engine", "environments"]
    assert list(processes["policy"]["phases"]) == ["score", "train", "update"]
    phases = processes["policy"]["phases"]
    assert processes["policy"]["peak"] == max(sum(parts.values()) for parts in phases.values())
    assert any("every row is counted with 16 tokens" in text for text in planned["not_counted"])
    assert planned["step"] is None


def test_the_greedy_rollouts_of_remax_have_keys_and_values():
    def keys_and_values(samples, *overrides):
        given = [IN_PROCESS, "grpo.num_prompts_per_step=2", f"grpo.num_generations_per_prompt={samples}", *overrides]
        registry = Registry(discover())
        run = load_config(GRPO, given, registry=registry, stages=()).run
        [process] = plan_memory(run, registry, on_gpu=False, limit=2**40).processes
        return process.phases["rollout"]["keys and values"]

    assert keys_and_values(7) < keys_and_values(7, "grpo.adv_estimator={name: remax}") == keys_and_values(8)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # 4 bytes for each of 18 kept tokens of 5 sampled ones, and for each of 16 tokens of a row; 512 rows.
        (["policy.generation.top_p=0.9"], 4 * 512 * (18 * 5 + 16)),
        (["policy.generation.top_p=0.9", "policy.generation.top_k=3"], 4 * 512 * (3 * 5 + 16)),
        ([], None),
    ],
)
def test_the_tokens_that_filters_keep_are_part_of_the_plan(overrides, expected):
    config = load_config(GRPO, [*overrides, IN_PROCESS]).run
    planned = plan_memory(config, Registry(discover()), on_gpu=False, limit=None)
    [process] = planned.processes
    assert process.phases[process.peak_phase].get("kept tokens") == expected


@pytest.mark.slow
def test_pictures_of_the_data_are_part_of_the_plan_and_rows_that_cannot_be_read_are_named(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)

    def planned(*overrides):
        run = load_config(EXAMPLES / "grpo_pictures.yaml", ["policy.train_micro_batch_size=64", *overrides]).run
        return run, plan_memory(run, Registry(discover()), on_gpu=False, limit=None)

    run, with_pictures = planned("data.check_rows=4")
    [process] = with_pictures.processes
    # 36 patches of 2 frames, 3 colors and 8 x 8 pixels in float32, and 3 sizes of 8 bytes, for each row.
    assert process.phases["train"]["pictures"] == 4096 * (36 * 2 * 3 * 64 * 4 + 3 * 8)
    assert process.phases["rollout"]["features of pictures"] > 36 * 64 * 4
    assert "images: pictures that are larger than those of the first 4 rows" in with_pictures.not_counted
    assert prompts_in(run, microbatch(run, run.policy, training=True)) == 8
    _, without = planned("++data.images.processor_kwargs.max_pixel=1")
    assert any(text.startswith("images: the rows cannot be read") for text in without.not_counted)
    fewer = without.processes[0].phases["train"]["activations"]
    assert process.phases["train"]["activations"] > 1.1 * fewer


def test_overrides_that_make_a_run_fit_make_it_fit_when_they_are_applied():
    _, planned = plan("--memory", "24GiB", IN_PROCESS)
    limit = f"{planned['peak'] * 0.8 / 2**20:.0f}MiB"
    code, too_large = plan("--memory", limit, IN_PROCESS)
    assert (code, too_large["fits"]) == (1, False)
    overrides = too_large["suggestion"]["overrides"]
    assert overrides == ["policy.train_micro_batch_size=128"]
    code, applied = plan("--memory", limit, IN_PROCESS, *overrides)
    assert (code, applied["fits"]) == (0, True)
    assert applied["peak"] == too_large["suggestion"]["peak"]


def test_what_does_not_fit_is_printed_with_the_overrides_to_copy():
    result = rlcore("plan", GRPO, "--memory", "550MiB", IN_PROCESS)
    assert result.returncode == 1
    assert "The run does not fit. The largest part is" in result.stdout
    assert "policy.train_micro_batch_size=" in result.stdout


@pytest.mark.slow
def test_a_plan_for_gpus_is_marked_as_computed_and_counts_the_share_of_the_engine():
    engine = "++policy.generation.vllm_cfg"
    given = (EXAMPLES / "grpo_smollm2_vllm.yaml", f"policy.model_name={MODEL}", f"{engine}.kv_cache_gib=null")
    result = rlcore("plan", *given, "--gpu", "80GiB")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Computed, not run on a GPU.")
    assert "does not describe its memory" not in result.stdout
    share = f"{engine}.gpu_memory_utilization"
    [gpu] = json.loads(rlcore("plan", *given, "--gpu", "80GiB", f"{share}=0.5", "--json").stdout)["processes"]
    assert sum(gpu["phases"]["rollout"].values()) == 40 * 2**30
    awake = rlcore("plan", *given, "--gpu", "80GiB", f"{share}=0.5", f"{engine}.sleep_level=0", "--json")
    [together] = json.loads(awake.stdout)["processes"]
    for phase in ("score", "train", "update"):
        assert sum(together["phases"][phase].values()) == sum(gpu["phases"][phase].values()) + 40 * 2**30
    # While the engine samples, the policy has what it always has: no activations, gradients or logits.
    always = {part: size for part, size in gpu["phases"]["score"].items() if part in gpu["phases"]["update"]}
    assert together["phases"]["refit"]["engine keys and values"] == together["phases"]["rollout"]["engine keys and values"]
    assert sum(together["phases"]["rollout"].values()) == sum(always.values()) + 40 * 2**30
    # The weights do not fit into a share of 2 MB, so vLLM would not start.
    small = rlcore("plan", *given, "--gpu", "80GiB", f"{share}=0.000025", "--json")
    assert (small.returncode, json.loads(small.stdout)["fits"]) == (1, False)


def test_a_backend_that_does_not_describe_its_memory_is_named(tmp_path):
    section = "++policy.generation.openai_cfg"
    server = (f"{section}.base_url=http://127.0.0.1:1/v1", f"{section}.model=sums", f"{section}.weight_updates=vllm")
    engine = ("policy.generation.backend=openai", f"policy.generation.refit_folder={tmp_path}", *server)
    result = rlcore("plan", GRPO, *engine, "--gpu", "80GiB")
    assert result.returncode == 0, result.stderr
    assert "all of the engine: its backend openai does not describe its memory" in result.stdout
    assert "The components that describe their memory fit. Whether the whole run fits is unknown" in result.stdout
    assert "time per step: not predicted for GPUs that are given by their size" in result.stdout


@pytest.mark.parametrize("hardware", [(IN_PROCESS, "--memory", "24GiB"), ("--memory", "24GiB"), ("--gpu", "h100")])
def test_a_run_whose_backends_describe_nothing_is_planned_without_them(tmp_path, monkeypatch, hardware):
    (tmp_path / "plain_backends.py").write_text(
        "from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy\n"
        "class Policy(HuggingFacePolicy):\n    memory_planner = None\n"
        "class Engine(HuggingFaceGeneration):\n    memory_planner = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    backends = ("policy.backend=plain_backends.Policy", "policy.generation.backend=plain_backends.Engine")
    code, found = plan(*backends, *hardware)
    assert (code, found["fits"]) == (0, None)
    assert found["not_counted"][:2] == [
        "all of `policy`: its backend plain_backends.Policy does not describe its memory",
        "all of the engine: its backend plain_backends.Engine does not describe its memory",
    ]
    if "--gpu" in hardware:
        assert found["step"]["seconds"] is None
        assert all("plain_backends." in reason for reason in found["step"]["not_predicted"].values()), found["step"]


def test_the_time_on_a_named_gpu_is_computed_and_marked():
    code, planned = plan("--gpu", "h100", "--completion-tokens", "4")
    step = planned["step"]
    assert (code, planned["computed_not_run"], planned["limit"], step["gpu"]) == (0, True, 80 * 2**30, "H100")
    assert set(step["phases"]) == {"rollout", "refit", "train", "update"}
    assert (step["completion_tokens"], step["seconds"]) == (4, pytest.approx(sum(step["phases"].values())))
    printed = rlcore("plan", GRPO, "--gpu", "H100").stdout
    assert "on H100 GPUs, computed, not run on a GPU" in printed
    assert "passes reach 40% of the peak" in printed


def test_a_measured_step_has_the_phases_of_the_run_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = ("grpo.num_prompts_per_step=4", "policy.train_micro_batch_size=32")
    code, planned = plan("--measure", IN_PROCESS, *rows)
    step = planned["step"]
    assert (code, step["gpu"]) == (0, None)
    assert set(step["phases"]) == {"refit", "rollout", "score", "train"}
    assert 0 < sum(step["phases"].values()) <= step["seconds"]
    assert 1 <= step["completion_tokens"] <= 5
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_fit_is_not_measured(monkeypatch):
    monkeypatch.setattr(rlcore_cli.plan, "available_memory", lambda: 500 * 2**20)
    monkeypatch.setattr(time_plan, "build_run", lambda *_, **__: pytest.fail("started"))
    result = rlcore("plan", GRPO, IN_PROCESS, "--measure")
    assert result.returncode == 1
    assert "time per step: not measured; because the run does not fit" in result.stdout


def test_a_model_without_weights_is_planned_but_not_measured(tmp_path):
    for name in MODEL.glob("*.json"):
        shutil.copy(name, tmp_path)
    given = (GRPO, IN_PROCESS, f"policy.model_name={tmp_path}")
    planned = rlcore("plan", *given)
    assert planned.returncode == 0
    assert "not measured; use --measure" in planned.stdout
    refused = rlcore("plan", *given, "--measure")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "model.safetensors" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_algorithm_that_ends_early_cannot_be_measured(monkeypatch):
    monkeypatch.setattr("rl_train.algorithms.grpo.train", lambda config, run: None)
    registry = Registry(discover())
    with pytest.raises(ConfigError, match="grpo ended before its second step"):
        time_plan.measure_step(load_config(GRPO, [IN_PROCESS], registry=registry), registry)


@pytest.mark.slow
def test_processes_of_a_measured_run_end_with_the_command_and_on_sigterm(tmp_path):
    short = Path(tempfile.mkdtemp(dir="/tmp"))  # sockets of Ray have short paths
    command = [sys.executable, "-m", "rlcore_cli.main", "plan", str(GRPO), "--measure"]
    environment = {**os.environ, "TMPDIR": str(short), marked_processes.MARK: str(tmp_path)}
    settings = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "grpo.num_prompts_per_step=4"], **settings) as process:
        out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "measured in the second step" in out
    marked_processes.assert_gone(str(tmp_path))
    assert not list(short.glob("rlcore-plan-*"))
    assert not (tmp_path / "runs").exists()
    with subprocess.Popen(command, **settings) as process:
        until = time.monotonic() + 300
        while not list(short.glob("rlcore-plan-*")):
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(1)
        process.terminate()
        process.communicate(timeout=120)
    assert process.returncode == 143
    marked_processes.assert_gone(str(tmp_path))
    assert not list(short.glob("rlcore-plan-*"))
    shutil.rmtree(short)


@pytest.mark.slow
@pytest.mark.megatron
def test_ranks_of_megatron_are_planned_without_other_ranks():
    layout = ("policy.backend=megatron", "++policy.megatron_cfg.tensor_model_parallel_size=2")
    code, planned = plan("--memory", "24GiB", *layout, "cluster.workers_per_node=2")
    ranks = next(process for process in planned["processes"] if process["name"] == "policy")
    assert (code, ranks["count"]) == (0, 2)
    assert set(ranks["phases"]["train"]) >= {"weights", "gradients", "optimizer state", "activations"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "24"), "--memory 24 is not a size"),
        (("--gpu", "0GiB"), "--gpu 0GiB is not a size"),
        (("--gpu", "h1000"), "one of: a10, a40, a100"),
        (("--gpu", "80GiB", "--memory", "24GiB"), "not both"),
        (("--measure", "--gpu", "h100"), "leave out --gpu and --memory"),
        (("--measure", "--memory", "24GiB"), "leave out --gpu and --memory"),
        (("--completion-tokens", "8"), "with --gpu only"),
        (("--measure", IN_PROCESS, "grpo.max_num_steps=1"), "max_num_steps: is 1"),
        (("policy.model_name=nowhere/at/all",), "nowhere/at/all"),
        (("policy.nothing=1",), "nothing"),
    ],
)
def test_wrong_input_ends_with_2(arguments, message):
    result = rlcore("plan", GRPO, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("length", "new_tokens", "rows", "group", "shape"),
    [
        (200, 40, 8, 8, (1, 160 + 8 * 40)),
        (200, 40, 8, 4, (1, 2 * 160 + 8 * 40)),
        (200, 40, 8, 2, (1, 4 * 160 + 8 * 40)),
        (200, 40, 1, 8, (1, 200)),
        (44, 40, 8, 8, (8, 44)),  # sharing 4 of 44 tokens is not worthwhile
        (60, 40, 8, 8, (8, 45)),  # with 6 tokens it is, and then 8 rows of a 5-token prompt are the most to compute
    ],
)
def test_rows_of_a_prompt_are_planned_as_one_sequence(length, new_tokens, rows, group, shape):
    sizes = (f"policy.max_total_sequence_length={length}", f"policy.generation.max_new_tokens={new_tokens}")
    groups = (f"grpo.num_generations_per_prompt={group}", f"grpo.num_prompts_per_step={8 // group}")
    rest = ("policy.train_global_batch_size=null", f"policy.train_micro_batch_size={rows}")
    run = load_config(GRPO, [*sizes, *groups, *rest], registry=Registry(discover())).run
    assert with_shared_prefixes(run, microbatch(run, run.policy, training=True)).shape == shape


def test_sft_that_samples_in_validation_only_is_timed_without_a_rollout():
    registry = Registry(discover())
    overrides = [f"policy.model_name={MODEL}", IN_PROCESS, "sft.global_batch_size=4"]
    run = load_config(EXAMPLES / "sft_addition.yaml", overrides, registry=registry).run
    plan = plan_time(run, registry, gpu=GPUS["h100"])
    assert (set(plan.phases), plan.not_predicted) == ({"train", "update"}, {})


def test_sizes_have_binary_and_decimal_units():
    assert parse_size("1.5 gib", "--gpu") == 3 * 2**29
    assert parse_size("80GB", "--gpu") == 80 * 10**9


def test_a_run_that_is_too_large_for_the_machine_is_warned_about(monkeypatch, caplog):
    registry = Registry(discover())
    run = load_config(GRPO, [IN_PROCESS], registry=registry).run
    monkeypatch.setattr(suggestions, "available_memory", lambda: 2**29)
    with caplog.at_level(logging.WARNING):
        suggestions.warn_if_too_large(run, registry)
    [record] = caplog.records
    assert "512.0 MiB are available" in record.getMessage()
    assert "phase train" in record.getMessage()


def test_a_small_run_is_not_planned_before_it_starts(monkeypatch):
    registry = Registry(discover())
    run = load_config(GRPO, [IN_PROCESS], registry=registry).run
    monkeypatch.setattr(suggestions, "available_memory", lambda: 2**35)
    monkeypatch.setattr(suggestions, "plan_memory", lambda *_, **__: pytest.fail("planned"))
    suggestions.warn_if_too_large(run, registry)
