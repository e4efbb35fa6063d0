"""`rlcore explain`: meaning, type, bounds, default and reader of a key, and with a config its value and origin."""

import json
import re
import sys
from pathlib import Path

import pytest
from command_line import rlcore

from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.worker import GenerationFacts, PolicyFacts
from rl_core.plugins.component import Kind
from rlcore_cli.interface import interface_of

GRPO = Path(__file__).parents[2] / "examples" / "grpo_addition.yaml"


def explain(*arguments):
    return rlcore("explain", *arguments)


def test_a_key_without_a_config():
    lines = explain("policy.generation.temperature").stdout.splitlines()
    assert lines[:5] == [
        "policy.generation.temperature",
        "  meaning   Sampling temperature. Algorithms that sample score tokens at the same temperature; all others score "
        "at 1.0.",
        "  type      float",
        "  allowed   a number, more than 0.0",
        "  default   1.0",
    ]
    # Further backends may be installed, which read it as well.
    assert "generation backend hf (rl_backends_hf.generation:HuggingFaceGeneration)" in lines[5]
    assert lines[6] == "  defined   rl_core.config.policy_sections:GenerationConfig"


def test_a_key_in_a_config_shows_its_value_and_origin():
    lines = explain("policy.max_total_sequence_length", "--config", GRPO).stdout.splitlines()
    number = next(n for n, line in enumerate(GRPO.read_text().splitlines(), 1) if "max_total_sequence_length" in line)
    assert lines[0] == "policy.max_total_sequence_length = 16"
    assert lines[1] == f"  from      {GRPO}:{number}:30"


def test_an_override_is_named_as_the_origin():
    lines = explain("policy.generation.temperature", "policy.generation.temperature=0.7", "--config", GRPO).stdout.splitlines()
    assert lines[:2] == [
        "policy.generation.temperature = 0.7",
        "  from      override #1 `policy.generation.temperature=0.7`",
    ]


def test_an_argument_of_the_optimizer_shows_its_type_and_range():
    for config in ((), ("--config", GRPO)):
        output = explain("policy.optimizer.kwargs.lr", *config).stdout
        assert re.search(r"type +float\n +allowed +a number, 0 or more\n +default +1e-05\n", output)
    output = explain("policy.scheduler.kwargs.num_warmup_steps").stdout
    assert re.search(r"allowed +a whole number of optimizer steps, 0 or more\n", output)


def test_a_key_is_explained_although_another_file_is_missing(tmp_path):
    (tmp_path / "run.yaml").write_text(f"defaults: {GRPO}\ndata: {{_override_: true, train_data_path: nowhere.jsonl}}\n")
    result = explain("policy.optimizer.kwargs.lr", "--config", tmp_path / "run.yaml")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("policy.optimizer.kwargs.lr = ")
    assert rlcore("validate", tmp_path / "run.yaml").returncode == 2


@pytest.mark.parametrize(("section", "key"), [("data.train", "dataset_name"), ("env", "max_concurrency")])
def test_a_common_key_shows_a_default_only_if_all_components_have_it(section, key):
    output = explain(section).stdout
    assert re.search(rf"  {key} +by component +\w", output)
    assert "null" in output


@pytest.mark.parametrize(
    ("key", "default"), [("teacher.frozen", "true"), ("value.head", '"scalar"'), ("policy.frozen", "false")]
)
def test_a_default_that_the_section_implies_is_shown(key, default):
    assert f"  default   {default}\n" in explain(key).stdout


def test_a_section_lists_its_keys():
    assert "  num_prompts_per_step" in explain("grpo").stdout
    lines = explain("cluster.deadlines", "--config", GRPO).stdout.splitlines()
    assert lines[:2] == ["cluster.deadlines", "  start_s        600.0   default of DeadlineConfig"]


def test_the_section_of_many_components_lists_them_with_the_keys_that_all_have():
    lines = explain("loss_fn").stdout.splitlines()
    assert len(lines) < 40
    assert re.match(r"loss_fn: section of one of \d+ components", lines[0])
    assert any(re.match(r"  name +null +Name of a registered loss", line) for line in lines)
    assert any(re.match(r"  dpo +\d+ +DPO preference loss", line) for line in lines)
    assert lines[-1].startswith("To see the keys of one: rlcore explain loss_fn --component ")


def test_one_component_of_a_section_shows_its_keys_with_their_defaults():
    lines = explain("loss_fn", "--component", "dpo").stdout.splitlines()
    assert lines[0].startswith("loss_fn: loss dpo (")
    assert any(re.match(r"  label_smoothing +0\.0 +\w", line) for line in lines)
    result = explain("loss_fn", "--component", "dpoo")
    assert result.returncode == 2
    assert "Did you mean 'dpo'?" in result.stderr


@pytest.mark.parametrize(
    ("key", "heading"),
    [
        ("env", "env.<task>: section of one of "),
        ("env.math", "env.math: environment math ("),
        ("env.sums", "env.sums: section of one of "),
        ("logger.loggers", "logger.loggers.<name>: section of one of "),
        ("data.mix", "data.mix.<name>: section of one of "),
    ],
)
def test_sections_with_user_chosen_names_can_be_explained(key, heading):
    result = explain(key)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(heading)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("policy.temperature", "policy.generation.temperature"),
        ("policy.generation.temprature", "policy.generation.temperature"),
        ("clster", "cluster"),
        ("policy.lr", "policy.optimizer.kwargs.lr"),
        ("learning_rate", "policy.optimizer.kwargs.lr"),
        ("policy.learning_rate", "policy.optimizer.kwargs.lr"),
        ("policy.weight_decay", "policy.optimizer.kwargs.weight_decay"),
        ("grpo.max_steps", "grpo.max_num_steps"),
        ("grpo.temprature", "policy.generation.temperature"),
        ("grpo.num_prompt_per_step", "grpo.num_prompts_per_step"),
        ("max_prompt_length", "data.max_input_seq_length"),
        ("eval_strategy", "grpo.val_period"),
    ],
)
@pytest.mark.parametrize("config", [(), ("--config", GRPO)])
def test_an_unknown_key_suggests_the_one_that_was_meant(key, meant, config):
    result = explain(key, *config)
    assert result.returncode == 2
    assert result.stderr.endswith(f"key {key}. Did you mean {meant}?\n")


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("disable_dropout", "Model dropout is only on in SFT"),
        ("policy.ref_model", "The reference policy is always the initial policy."),
        ("adam_beta1", "Set `policy.optimizer.kwargs.betas"),
        ("data.dataset_num_proc", "there is nothing to set"),
    ],
)
@pytest.mark.parametrize("config", [(), ("--config", GRPO)])
def test_a_setting_of_another_library_without_a_key_says_what_to_do_instead(key, instead, config):
    result = explain(key, *config)
    assert result.returncode == 2
    assert instead in result.stderr
    assert "Did you mean" not in result.stderr
    section = key if "." in key else f"policy.{key}"
    assert instead in rlcore("validate", GRPO, f"++{section}=1").stderr


def test_overrides_without_a_config_are_refused():
    result = explain("grpo.seed", "grpo.seed=3")
    assert (result.returncode, "give it with --config" in result.stderr) == (2, True)


def test_the_schema_is_written_to_a_file(tmp_path):
    target = tmp_path / "schema.json"
    result = rlcore("schema", "--output", target, "--plugins", "core,hf")
    assert (result.returncode, target.read_text()[:1]) == (0, "{")


def test_the_schema_of_an_unknown_plugin_is_refused():
    result = rlcore("schema", "--plugins", "hff")
    assert (result.returncode, "Did you mean 'hf'?" in result.stderr) == (2, True)


def test_a_null_key_shows_what_a_run_uses_instead_on_each_kind_of_device(tmp_path):
    lines = explain("policy.precision", "--config", GRPO).stdout.splitlines()
    assert lines[0] == "policy.precision = null"
    assert lines[2] == '  resolved  "float32" on CPUs, "bfloat16" on GPUs'
    engine = ("++policy.generation.backend=vllm", "++policy.generation.vllm_cfg.max_model_len=null", "--config", GRPO)
    rows = dict(line.split(maxsplit=1) for line in explain("policy.generation.vllm_cfg", *engine).stdout.splitlines()[1:])
    assert rows["sleep_level"].startswith("null (0 on CPUs, 2 on GPUs)")
    assert rows["max_num_seqs"].startswith("null (256 on CPUs, null on GPUs)")
    assert rows["enforce_eager"].startswith("null (true on CPUs, false on GPUs)")
    assert rows["max_model_len"].startswith("null (16) ")
    on_cpus = explain("policy.generation.vllm_cfg.sleep_level", "++cluster.use_gpus=false", *engine).stdout.splitlines()
    assert on_cpus[2] == "  resolved  0"


@pytest.mark.megatron
def test_a_resolved_default_of_megatron():
    megatron = ("policy.backend=megatron", "--config", GRPO)
    lines = explain("policy.megatron_cfg.use_distributed_optimizer", *megatron).stdout.splitlines()
    assert lines[2] == "  resolved  false on CPUs, true on GPUs"


def test_a_name_that_means_something_else_in_another_library_suggests_both_keys():
    assert "Did you mean env.<name>.max_length or policy.max_total_sequence_length?" in explain("max_length").stderr
    assert "Did you mean policy.sequence_packing?" in explain("packing").stderr
    assert "Did you mean checkpointing.metric_name or stop.metric_name?" in explain("metric_for_best_model").stderr
    assert "Did you mean loss_fn.sft_loss_weight?" in explain("rpo_alpha").stderr
    assert "Did you mean loss_fn.beta or loss_fn.reference_policy_kl_penalty?" in explain("beta").stderr
    both = "Did you mean grpo.adv_estimator.reward_weights or env.<name>.reward_weights?"
    assert both in explain("reward_weights").stderr


def test_the_interface_of_a_policy_shows_methods_facts_capabilities_and_classes_by_path():
    output = explain("interface", "policy").stdout
    for text in (
        "  train(data, loss_fn, *, eval_mode=False, gbs=None, mbs=None)  required\n      Take one optimizer step",
        "  get_logprobs(data)  default\n      Score every token of `data`",
        "  vocab_size: int  required\n      Number of token ids that it scores.",
        "  gradient_scale: float | Literal['dynamic']  optional\n",
        "  scalar_head\n      value and reward models (`head: scalar`).\n      `get_values`, and losses",
        "`policy.backend: my_module.MyClass`",
        '`capabilities = ("in_process", "shared_memory")`',
    ):
        assert text in output
    described = json.loads(explain("interface", "policy", "--json").stdout)
    assert {"name": "vocab_size: int", "status": "required", "meaning": "Number of token ids that it scores."} in described[
        "facts"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interface", "polcy"), "There is no kind 'polcy'. Did you mean 'policy'? Kinds: policy, generation, "),
        (("interface",), "There is no kind ''. Kinds: policy, "),
        (("policy", "--json"), "--json needs `interface` and a kind of component"),
    ],
)
def test_an_interface_of_no_kind_and_json_of_a_key_are_refused(arguments, message):
    result = explain(*arguments)
    assert (result.returncode, message in result.stderr) == (2, True)


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_component_has_an_interface_with_documented_members(kind):
    interface = interface_of(kind)
    assert bool(interface.classes) == (kind not in (Kind.ALGORITHM, Kind.COMMAND))  # those are functions
    undocumented = [entry.name for base in interface.classes for entry in base.members if not entry.meaning]
    assert [name for name in undocumented if not name.startswith("__")] == []
    assert bool(interface.facts) == (kind in (Kind.POLICY, Kind.GENERATION))
    assert [fact.name for fact in interface.facts if fact.status == "optional" and "default" not in fact.meaning] == []


def test_required_are_the_abstract_methods_and_the_keys_without_a_default():
    interface = interface_of(Kind.POLICY)
    [base] = (each for each in interface.classes if each.path.endswith(ColocatablePolicyInterface.__name__))
    required = {entry.name.partition("(")[0] for entry in base.members if entry.status == "required"}
    assert required == ColocatablePolicyInterface.__abstractmethods__
    for kind, facts in ((Kind.POLICY, PolicyFacts), (Kind.GENERATION, GenerationFacts)):
        assert {entry.name.partition(":")[0] for entry in interface_of(kind).facts} == {*facts.__annotations__}


def test_a_class_of_a_distribution_that_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rl_sandbox", None)
    assert interface_of(Kind.SANDBOX).classes[0].meaning == "Not installed: pip install rl-sandbox."
