"""`rlcore check-logprobs`: exit code 0 if policy and engine agree, 1 with the number above its limit, 2 for a user error."""

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import peft
import pytest
import torch
from command_line import rlcore
from marked_processes import MARK, assert_gone
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rl_core.errors import UserError
from rlcore_cli.main import app

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
CONFIG = {
    "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "seed": 3},
    "policy": {
        "backend": "hf",
        "model_name": str(MODEL),
        "max_total_sequence_length": 16,
        "generation": {"backend": "hf", "max_new_tokens": 5},
    },
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40}},
    "env": {"arithmetic": {"num_workers": 1}},
}
IN_PROCESS = "cluster.backend=in_process"

PERTURBED = """
from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_core.config.schema import PolicyConfig


class PerturbedPolicy(HuggingFacePolicy):
    '''Sends the weights that it was given, and scores with one tensor of them changed.'''

    capabilities = ("by_reference",)

    def __init__(self, *, config, cluster, deadlines):
        values = {key: getattr(config, key) for key in PolicyConfig.model_fields}
        super().__init__(config=HFPolicyConfig(**values), cluster=cluster, deadlines=deadlines)

    def get_logprobs(self, data):
        norm = self.group.worker.model.model.model.norm.weight.data
        norm.mul_(1.3)
        try:
            return super().get_logprobs(data)
        finally:
            norm.div_(1.3)
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def rlcore_process(*arguments, environment=None):
    return subprocess.run(
        [sys.executable, "-m", "rlcore_cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def check(*arguments):
    return CliRunner().invoke(app, ["check", "logprobs", *arguments])


def test_a_policy_and_an_engine_of_one_model_are_consistent(config, tmp_path):
    result = check(config, IN_PROCESS)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "policy hf float32, engine hf float32; weights synchronized by by_reference and verified"
    assert lines[-1] == "consistent"
    assert any(line.startswith("exp(mean |d|)  1.00000") and line.endswith("limit 1.05") for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_the_number_that_fails_is_named_and_the_exit_code_is_1(config):
    # The engine computes with another epsilon than the policy.
    result = check(config, IN_PROCESS, "++policy.generation.hf_cfg.config_overrides.rms_norm_eps=1.0")
    assert result.exit_code == 1
    assert "not consistent: exp(mean |d|) is " in result.output
    assert "over all tokens, and 1.05 is allowed" in result.output


def test_a_policy_that_scores_with_a_perturbed_tensor_fails(config, tmp_path):
    (tmp_path / "perturbed_policy.py").write_text(PERTURBED)
    result = rlcore("check", "logprobs", config, IN_PROCESS, "--json", "policy.backend=perturbed_policy.PerturbedPolicy")
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    assert report["consistent"] is False
    assert report["multiplicative_error"] > 1.05
    assert len(report["failures"]) == 1


@pytest.mark.full("the other tests here read the JSON and the numbers; core/cluster/test_no_orphans.py ends drivers of Ray")
@pytest.mark.slow
def test_over_ray_standard_output_has_only_json_and_no_process_remains(config, tmp_path):
    mark = uuid.uuid4().hex
    bfloat16 = "policy.generation.hf_cfg.precision=bfloat16"
    result = rlcore_process("check", "logprobs", config, bfloat16, "--num-prompts", "7", "--json", environment={MARK: mark})
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["engine"], report["refit"], report["num_rows"]) == ("hf bfloat16", "shared_memory", 7)
    assert sum(part["num_tokens"] for part in report["by_position"]) == report["num_tokens"]
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert_gone(mark)


@pytest.fixture
def small_adapter(tmp_path):
    """Folder of an adapter whose update is below the rounding of most bfloat16 weights."""
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), peft.LoraConfig(target_modules="all-linear"))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-4)
    model.save_pretrained(tmp_path / "adapter")
    return f"++policy.hf_cfg.lora.adapter_path={tmp_path / 'adapter'}"


BFLOAT16 = (IN_PROCESS, "policy.precision=bfloat16", "--threshold", "1.2")


@pytest.mark.parametrize("used", ["adapter", "merged"])
def test_an_adapter_is_compared_as_an_adapter_and_merged(config, small_adapter, used):
    target = () if used == "adapter" else ("++policy.generation.lora=merged",)
    result = rlcore("check", "logprobs", config, *BFLOAT16, *target, small_adapter, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["engine"] == "hf bfloat16"
    lora = report["lora"]
    assert (lora["used"], lora["adapters_are_zero"], lora["not_compared"]) == (used, False, None)
    numbers = lora["targets"]
    assert numbers[used] == {"mean_abs_difference": report["mean_abs_difference"], "kl": report["kl"]}
    for key in ("mean_abs_difference", "kl"):
        assert numbers["adapter"][key] < 0.1 * numbers["merged"][key]


def test_targets_of_adapters_are_printed_with_the_one_that_the_run_uses_and_whether_b_is_0(config, small_adapter):
    trained = check(config, *BFLOAT16, small_adapter).output.splitlines()
    assert [line.split()[0] for line in trained[-4:-2]] == ["adapter", "merged"], trained
    assert trained[-4].endswith("used by this run")
    assert "B of all adapters is 0" in check(config, *BFLOAT16, "++policy.hf_cfg.lora.rank=2").output
    dora = check(config, *BFLOAT16, "++policy.hf_cfg.lora={rank: 2, use_dora: true}").output.splitlines()
    assert re.fullmatch("merged .* used by this run", dora[-4]), dora
    assert re.fullmatch("adapter was not compared. .*policy.generation.lora.* adapter cannot be used: .*", dora[-3]), dora


def test_a_tighter_threshold_is_applied(config):
    assert check(config, IN_PROCESS, "--threshold", "1.0000000001").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("policy.precison=bfloat16",), "Did you mean 'precision'?"),
        (("data.train.path=x",), "path"),
        (("policy.model_name=/no/such/model",), "/no/such/model"),
        (("++data.max_input_seq_length=3",), "record 0 has"),
    ],
)
def test_an_error_in_the_config_is_a_user_error_and_starts_nothing(config, arguments, said):
    result = check(config, IN_PROCESS, *arguments)
    # For an error that `main` would print, the runner returns the exception.
    assert isinstance(result.exception, UserError), result.output
    assert result.exception.exit_code == 2
    assert said in str(result.exception)


def test_a_config_without_an_engine_says_how_to_name_one(config, tmp_path):
    supervised = {"sft": {}, "policy": {**CONFIG["policy"]}, "data": CONFIG["data"]}
    del supervised["policy"]["generation"]
    (tmp_path / "sft.yaml").write_text(json.dumps(supervised))
    result = check("sft.yaml", IN_PROCESS)
    assert isinstance(result.exception, UserError)
    assert "there is no engine to compare with the policy" in str(result.exception)


def test_the_command_imports_nothing_heavy_before_it_runs():
    code = (
        "import sys, rlcore_cli.check_model, rlcore_cli.check_model\n"
        "print(sorted({'torch', 'ray', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.strip() == "[]"
