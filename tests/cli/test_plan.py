"""`rlcore plan`: memory by process, time of a step, overrides that were tried, exit codes; the warning of `rlcore train`."""

import json
import logging
from pathlib import Path

import pytest
from command_line import rlcore

from rl_core.errors import NotSupportedError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.files import parse_size
from rl_train.plan import suggestions, time_plan
from rl_train.plan.planner import microbatch, with_shared_prefixes
from rl_train.plan.time_plan import GPUS

EXAMPLES = Path(__file__).parents[2] / "examples"
GRPO = EXAMPLES / "grpo_addition.yaml"
MODEL = EXAMPLES / "addition" / "model"
IN_PROCESS = "cluster.backend=in_process"


def plan(*arguments):
    """Exit code and JSON of the command."""
    result = rlcore("plan", GRPO, *arguments, "--json")
    assert all(line.startswith(("tracing", "the run does not fit")) for line in result.stderr.splitlines())
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
    step = planned["step"]
    assert set(step["phases"]) == {"rollout", "refit", "train", "update"}
    assert step["seconds"] == pytest.approx(sum(step["phases"].values()))
    assert (step["prompt_tokens"] + step["completion_tokens"], step["not_predicted"]) == (16, {})


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
        "class Policy(HuggingFacePolicy):\n    memory_planner = time_planner = None\n"
        "class Engine(HuggingFaceGeneration):\n    memory_planner = time_planner = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    backends = ("policy.backend=plain_backends.Policy", "policy.generation.backend=plain_backends.Engine")
    code, found = plan(*backends, *hardware)
    assert (code, found["fits"], found["step"]["seconds"]) == (0, None, None)
    assert found["not_counted"][:2] == [
        "all of `policy`: its backend plain_backends.Policy does not describe its memory",
        "all of the engine: its backend plain_backends.Engine does not describe its memory",
    ]
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


class _Clockwork:
    """A backend's planner in which a token of a pass takes a second, and a sampled one a tenth."""

    refit_bytes_per_s = 1e9

    def __init__(self, section):
        self.section = section

    def seconds(self, **given):
        if "rows" in given:
            return 0.1 * given["rows"] * given["completion"]
        score, scored = {"score": given["tokens"]}, given["scored"]
        return {**score, "train": 2 * given["tokens"] + scored, "update": 10.0} if given["training"] else score


def planned_time(monkeypatch, *overrides, prompt=None, completion=None, planner=_Clockwork):
    registry = Registry(discover())
    monkeypatch.setattr(time_plan, "_OVERHEAD", 1.0)
    monkeypatch.setattr(time_plan, "_planner", lambda registry, kind, section: planner(section))
    sizes = ("policy.max_total_sequence_length=20", "policy.generation.max_new_tokens=8", 'policy.shared_prefix="off"')
    rows = ("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=8", "policy.train_micro_batch_size=4")
    run = load_config(
        GRPO, [IN_PROCESS, *sizes, *rows, "policy.train_global_batch_size=null", *overrides], registry=registry
    ).run
    return time_plan.plan_time(run, registry, prompt=prompt, completion=completion)


def test_the_time_of_a_step_counts_all_rows_and_optimizer_steps(monkeypatch):
    plan = planned_time(monkeypatch)
    assert plan.phases == pytest.approx({"rollout": 0.1 * 32 * 8, "train": 32 * (2 * 20 + 8), "update": 10.0})
    assert (plan.prompt, plan.completion, plan.seconds) == (12, 8, pytest.approx(sum(plan.phases.values())))
    steps = planned_time(monkeypatch, "policy.train_global_batch_size=8").phases
    assert steps == pytest.approx({**plan.phases, "score": 32 * 20, "update": 40.0})
    compared = planned_time(monkeypatch, "++loss_fn.reference_policy_kl_penalty=0.1").phases
    assert compared == pytest.approx({**plan.phases, "reference": 32 * 20})


def test_lengths_that_are_given_replace_the_limits(monkeypatch):
    plan = planned_time(monkeypatch, prompt=3, completion=5)
    assert plan.phases["train"] == pytest.approx(32 * (2 * 8 + 5))
    assert (plan.prompt, plan.completion) == (3, 5)
    longest = planned_time(monkeypatch, prompt=30, completion=50)
    assert (longest.prompt + longest.completion, longest.completion) == (20, 8)


def test_prompts_that_rows_share_are_computed_once(monkeypatch):
    plan = planned_time(monkeypatch, "policy.shared_prefix=auto")
    assert plan.phases["train"] == pytest.approx(8 * (2 * (12 + 4 * 8) + 4 * 8))


def test_the_time_of_a_step_is_not_predicted_without_that_of_each_phase(monkeypatch):
    def unknown(section):
        raise NotSupportedError("nobody knows")

    plan = planned_time(monkeypatch, planner=unknown)
    assert (plan.seconds, plan.phases) == (None, {})
    assert plan.not_predicted == {"rollout": "nobody knows", "passes of policy": "nobody knows"}
    asynchronous = ("++rollout.max_staleness=1", "++loss_fn.ratio_to=sampler", "cluster.backend=ray")
    overlapping = planned_time(monkeypatch, *asynchronous)
    assert (overlapping.seconds, set(overlapping.not_predicted)) == (None, {"step"})


def test_threads_that_wait_on_a_busy_machine_take_at_most_the_time_of_one(monkeypatch):
    import torch

    class Waiting(_Clockwork):
        def seconds(self, **given):
            return 1.0 if "rows" in given else dict.fromkeys(("score", "train", "update"), 9.0 ** (torch.get_num_threads() - 1))

    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", torch._C.set_num_threads)  # vLLM replaces it when it is imported
    monkeypatch.setattr(time_plan, "_worker_threads", lambda run: 2)
    times = {}
    for load in (0.0, 3.0):
        monkeypatch.setattr(time_plan, "_load", lambda load=load: load)
        times[load] = planned_time(monkeypatch, "cluster.backend=ray", planner=Waiting).phases["update"]
    assert times == {0.0: 9.0, 3.0: 1.0}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("gpu", [None, "h100"])
def test_sft_that_samples_in_validation_only_is_timed_without_a_rollout(gpu):
    registry = Registry(discover())
    overrides = [f"policy.model_name={MODEL}", IN_PROCESS, "sft.global_batch_size=4"]
    run = load_config(EXAMPLES / "sft_addition.yaml", overrides, registry=registry).run
    plan = time_plan.plan_time(run, registry, gpu=None if gpu is None else GPUS[gpu])
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
