"""Errors that a run would hit only after minutes are found by `rlcore validate`, with line, key and fix."""

import importlib.util
import inspect
import json
import os
import sys

import pytest
import yaml

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.plugins.import_path import missing_target
from rl_train.config.loader import load_config
from rl_train.config.rules.rollouts import default_transports
from rl_train.config.rules.rule import CheckedConfig, Stage, Use
from rl_train.config.rules.run import machine_has_the_cpus
from rl_train.config.schedules import LR_SCHEDULER, OPTIM, SCHEDULERS, UNUSABLE_OPTIMIZERS, UNUSABLE_SCHEDULERS, arguments_of

OPTIMIZER = {
    "{name: torch.optim.AdamX}": "policy.optimizer.name: torch.optim.AdamX cannot be imported: torch.optim has no 'AdamX'. "
    "Did you mean 'Adamax'?",
    "{name: nowhere.Lion}": "policy.optimizer.name: nowhere.Lion cannot be imported: there is no package 'nowhere'. Install "
    "it, or put its folder on PYTHONPATH.",
    "{name: torch.optim.LBFGS}": "policy.optimizer.name: torch.optim.LBFGS cannot be used to train a language model: it "
    "needs a closure that recomputes the loss, which training steps do not have.",
    "{kwargs: {lr: -1e-4}}": "policy.optimizer.kwargs.lr: must be a number, 0 or more; found -0.0001.",
    "{kwargs: {lr: fast}}": "policy.optimizer.kwargs.lr: must be a number, 0 or more; found 'fast'.",
    "{kwargs: {betas: [0.9, 1.0]}}": "policy.optimizer.kwargs.betas: must be a list of two numbers, each 0 or more and less "
    "than 1; found a list of 2.",
    "{kwargs: {learning_rate: 0.1}}": "policy.optimizer.kwargs.learning_rate: torch.optim.AdamW has no argument "
    "'learning_rate'. Did you mean 'lr'? Its arguments are: lr, betas, eps, weight_decay, amsgrad, maximize, foreach, "
    "capturable, differentiable, fused, decay_matrices_only.",
    "{kwargs: {weight_decai: 0.1}}": "policy.optimizer.kwargs.weight_decai: torch.optim.AdamW has no argument 'weight_decai'. "
    "Did you mean 'weight_decay'? Its arguments are: lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, "
    "differentiable, fused, decay_matrices_only.",
    "{groups: {m: {name: torch.optim.Muom}}}": "policy.optimizer.groups.m.name: torch.optim.Muom cannot be imported: "
    "torch.optim has no 'Muom'. Did you mean 'Muon'?",
    "{groups: {m: {name: torch.optim.Muon, kwargs: {betas: [0.9, 0.9]}}}}": "policy.optimizer.groups.m.kwargs.betas: "
    "torch.optim.Muon has no argument 'betas'. Its arguments are: lr, weight_decay, momentum, nesterov, ns_coefficients, eps, "
    "ns_steps, adjust_lr_fn, decay_matrices_only.",
    "{groups: {m: {params: '*.q_proj.*', kwargs: {lr: -1}}}}": "policy.optimizer.groups.m.kwargs.lr: must be a number, 0 or "
    "more; found -1.",
    "{groups: {m: {params: '*.q_proj.*'}}}": "policy.optimizer.groups.m: has no effect: set its `name` or `kwargs`, or "
    "remove it.",
    "{groups: {rest: {name: torch.optim.Muon}}}": "policy.optimizer.groups.rest: 'rest' cannot name a group: use letters, "
    "digits, `_` and `-`, and not 'rest'.",
}
SCHEDULER = {
    "{name: cosin}": "policy.scheduler.name: unknown schedule 'cosin'. Did you mean 'cosine'? Use constant, cosine, "
    "linear, or a dotted name such as torch.optim.lr_scheduler.CosineAnnealingLR.",
    "{name: torch.optim.lr_scheduler.StepLr}": "policy.scheduler.name: torch.optim.lr_scheduler.StepLr cannot be imported: "
    "torch.optim.lr_scheduler has no 'StepLr'. Did you mean 'StepLR'?",
    "{name: torch.optim.lr_scheduler.StepLR}": "policy.scheduler.kwargs.step_size is required by "
    "torch.optim.lr_scheduler.StepLR.",
    "{name: torch.optim.lr_scheduler.ReduceLROnPlateau}": "policy.scheduler.name: torch.optim.lr_scheduler.ReduceLROnPlateau "
    "cannot be used as a schedule: it needs a metric at each step, but schedules are stepped without one. Use constant, "
    "cosine, "
    "linear.",
    "{name: linear, kwargs: {num_warmup: 3}}": "policy.scheduler.kwargs.num_warmup: the schedule linear has no argument "
    "'num_warmup'. Did you mean 'num_warmup_steps'? Its arguments are: num_training_steps, num_warmup_steps.",
    "{name: constant, kwargs: {num_warmup_steps: -1}}": "policy.scheduler.kwargs.num_warmup_steps: must be a whole number of "
    "optimizer steps, 0 or more; found -1.",
}


@pytest.mark.parametrize(
    ("key", "section"), [("optimizer", text) for text in OPTIMIZER] + [("scheduler", text) for text in SCHEDULER]
)
def test_an_invalid_optimizer_or_schedule_is_reported_with_its_line(files, good, key, section):
    expected = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}[key][section]
    [error] = files.errors(good.replace("  generation:", f"  {key}: {section}\n  generation:"))
    place, _, message = error.partition(": ")
    assert (place.split(":")[1], message) == ("6", expected)


@pytest.mark.parametrize(
    "optimizer",
    [
        "{name: 'torch.optim:SGD', kwargs: {lr: 0.1, momentum: 0.9}}",
        "{kwargs: {lr: 0, betas: [0.9, 0.95], decay_matrices_only: true}}",
        "{name: transformers.Adafactor, kwargs: {scale_parameter: false}}",
        "{name: torch.optim.Adafactor, kwargs: {eps: [null, 0.001]}}",
        "{groups: {matrices: {name: torch.optim.Muon, kwargs: {lr: 0.02}}, embed: {params: ['*embed*'], kwargs: {lr: 0}}}}",
    ],
)
def test_an_optimizer_that_works_is_accepted(files, good, optimizer):
    assert files.load(good.replace("  generation:", f"  optimizer: {optimizer}\n  generation:")).run.policy.optimizer.name


def test_arguments_read_from_source_files_are_those_of_the_installed_torch():
    torch = pytest.importorskip("torch")

    def classes(module, base):
        return {n: c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, base) and n[0] != "_"}

    def arguments(factory):
        parameters = list(inspect.signature(factory).parameters.values())[1:]
        by_need = ([p for p in parameters if p.default is p.empty], [p for p in parameters if p.default is not p.empty])
        return tuple(tuple(p.name for p in part) for part in by_need)

    optimizers = classes(torch.optim, torch.optim.Optimizer)
    assert set(UNUSABLE_OPTIMIZERS) < set(optimizers)
    schedulers = classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert set(SCHEDULERS) | set(UNUSABLE_SCHEDULERS) == set(schedulers)
    for module, found in ((OPTIM, optimizers), (LR_SCHEDULER, schedulers)):
        for name, factory in found.items():
            assert arguments_of(module, name) == arguments(factory), name


def test_settings_of_training_on_a_frozen_teacher_are_refused(files, good):
    text = good.replace("grpo:\n  num_prompts_per_step: 8", "distillation: {}")
    teacher = "teacher: {backend: hf, model_name: big, optimizer: {kwargs: {lr: 0.1}}}\n"
    [error] = files.errors(text + teacher)
    assert error == (
        "config.yaml:12:52: teacher.optimizer: has no effect, since this model is never trained: remove the section."
    )


def model_folder(folder, names=("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")):
    """A folder with a config and a safetensors file that has a header but no weights."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


@pytest.mark.parametrize("key", ["policy", "generation"])
def test_a_model_path_without_a_model_is_reported_with_its_line(files, good, key):
    folder = files.folder / "empty"
    folder.mkdir()
    file = files.write("x", "weights.bin")

    def error(path):
        if key == "policy":
            return files.errors(good.replace("some/model", str(path)))
        return files.errors(good.replace("tokens: 64", f"tokens: 64\n    model_name: {path}"))

    line, where = ("5", "policy.model_name") if key == "policy" else ("9", "policy.generation.model_name")
    [of_folder], [of_file] = error(folder), error(file)
    assert of_folder.split(":")[1] == of_file.split(":")[1] == line
    assert f"{where}: empty has no config.json, so it is not a model folder." in of_folder
    assert f"{where}: weights.bin is a file, but a model is a folder with config.json and weights" in of_file
    assert files.load(good.replace("some/model", str(model_folder(files.folder / "model")))).run


def test_a_run_folder_as_model_is_an_error_that_names_its_weights(files, good):
    weights = files.folder / "run" / "checkpoints" / "step_000010" / "policy" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    [error] = files.errors(good.replace("some/model", str(files.folder / "run")))
    assert error.endswith("The weights of a checkpoint are in run/checkpoints/step_000010/policy/weights.")


@pytest.mark.parametrize("given", [".", "checkpoints", "checkpoints/step_000010"])
def test_a_folder_above_a_model_is_an_error_that_names_the_model(files, good, given):
    checkpoint = files.folder / "run" / "checkpoints" / "step_000010"
    checkpoint.mkdir(parents=True)
    model_folder(checkpoint / "model")
    [error] = files.errors(good.replace("some/model", str(files.folder / "run" / given)))
    assert error.endswith("A model is in run/checkpoints/step_000010/model.")


@pytest.mark.parametrize(("path", "problem"), [("empty", "has no config.json"), ("empty/model", "does not exist")])
def test_a_wrong_model_folder_is_reported_together_with_invalid_options_of_the_backend(files, good, path, problem):
    (files.folder / "empty").mkdir()
    wrong = f"{path}\n  hf_cfg: {{trust_remote_code: maybe}}"
    of_model, of_option = files.errors(good.replace("some/model", wrong))
    assert problem in of_model
    assert "policy.hf_cfg.trust_remote_code: must be true or false" in of_option


@pytest.mark.parametrize("section", ["policy", "generation"])
@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_quantized_loading_without_bitsandbytes_is_refused(files, good, section, key, monkeypatch):
    spec_of = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else spec_of(name))
    before = "  generation:" if section == "policy" else "    max_new"
    indent, lora = ("  ", ", lora: {}") if section == "policy" else ("    ", "")
    errors = files.errors(good.replace(before, f"{indent}hf_cfg: {{{key}: true{lora}}}\n{before}"))
    assert any(f"hf_cfg.{key}: `{key}` needs bitsandbytes, which is not installed." in error for error in errors)
    if section == "generation":  # which is refused for training in any environment
        return
    other = good.replace(before, f"{indent}python: python3\n{indent}hf_cfg: {{{key}: true{lora}}}\n{before}")
    assert files.load(other).run  # another environment's libraries are not known here


def test_lora_targets_that_a_local_model_lacks_are_refused_with_a_suggestion(files, good):
    folder = model_folder(files.folder / "model")

    def text(lora):
        return good.replace("some/model", str(folder)).replace("  generation:", f"  hf_cfg: {{lora: {lora}}}\n  generation:")

    [error] = files.errors(text("{target_modules: [q_proj, v_projj]}"))
    assert error.startswith("config.yaml:6:35: policy.hf_cfg.lora.target_modules: 'v_projj' matches no layer of model. ")
    assert error.endswith("Its layers with weights: layers, mlp, model, q_proj, self_attn, up_proj.")
    [error] = files.errors(text("{target_modules: [up_pro]}"))
    assert "Did you mean 'up_proj'?" in error
    [error] = files.errors(text("{target_modules: '*_proj'}"))
    assert "policy.hf_cfg.lora.target_modules: '*_proj' is not a regular expression: nothing to repeat" in error
    for accepted in ("{target_modules: [q_proj, mlp.up_proj]}", "{}", "{target_modules: '.*_proj'}"):
        assert files.load(text(accepted)).run.policy.hf_cfg.lora is not None


DPO = """
    dpo: {}
    policy: {backend: hf, model_name: some/model}
    data:
      train: {dataset_name: preference, path: pairs.jsonl}
"""
PAIR = '{"prompt": "1+1?", "chosen": "2", "rejected": "3"}\n'


def test_preference_training_on_data_without_pairs_is_refused(files):
    files.write('\n\n{"question": "1+1?", "expected_answer": "2"}\n', "pairs.jsonl")
    [error] = files.errors(DPO)
    assert error.startswith("config.yaml:4:43: data.train.path: pairs.jsonl:2: the field 'chosen' is missing")
    [error] = files.errors(DPO.replace("dataset_name: preference", "dataset_name: jsonl"))
    assert error == (
        "config.yaml:4:25: data.train.dataset_name: jsonl has prompts or conversations, but dpo needs pairs of a chosen "
        "and a rejected answer. Use another dataset: `preference` reads pairs from JSON lines."
    )
    files.write(PAIR, "pairs.jsonl")
    assert files.load(DPO).run.data.train.dataset_name == "preference"


KTO = """
    kto: {}
    policy: {backend: hf, model_name: some/model}
    data:
      train: {dataset_name: preference, path: pairs.jsonl, label_key: label}
"""
LABELLED = '{"prompt": "1+1?", "completion": "2", "label": true}\n'


def test_labelled_answers_and_pairs_are_refused_by_the_algorithms_of_each_other(files):
    files.write(PAIR, "pairs.jsonl")
    [error] = files.errors(KTO)
    assert error.startswith("config.yaml:4:67: data.train.label_key: pairs.jsonl:1: the field 'label' is missing")
    assert error.endswith("is a pair of answers. Remove `label_key`, and set `split_pairs: true` or train with dpo")
    [error] = files.errors(KTO.replace(", label_key: label", ""))
    assert error == (
        "config.yaml:4:25: data.train.dataset_name: preference has pairs of a chosen and a rejected answer, but kto needs "
        "answers with a label. Set `label_key` if rows have one answer and a label; `split_pairs: true` makes two such answers "
        "of each pair."
    )
    split = KTO.replace("label_key: label", "split_pairs: true")
    assert files.load(split).run.data.train.kind_of_records == "unpaired"
    [error] = files.errors(split.replace("kto:", "dpo:"))
    assert "data.train.dataset_name: preference has answers with a label, but dpo needs pairs of a chosen" in error
    files.write(LABELLED, "pairs.jsonl")
    assert files.load(KTO).run.algorithm_name == "kto"
    [error] = files.errors(KTO.replace("kto:", "dpo:"))
    assert error.endswith("Remove `label_key` and `split_pairs` if rows are pairs, or train with kto.")
    [error] = files.errors(DPO)
    assert "so it is one answer with a label. Set `label_key: label`, and train on such rows with kto" in error
    [error] = files.errors(KTO.replace("kto:", "sft:"))
    assert "preference has answers with a label, but sft needs prompts or conversations" in error


@pytest.mark.parametrize("name", ["nll", "clipped_pg", "dpo", "orpo"])
def test_kto_refuses_losses_that_do_not_use_labels(files, name):
    files.write(LABELLED, "pairs.jsonl")
    [error] = files.errors(f"{KTO}    loss_fn: {{name: {name}}}\n")
    assert f"loss_fn.name: {name} does not use the labels of answers. Remove it, or use kto." in error


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [("dpo", "kto does not use pairs of answers"), ("rm", "kto needs log-probabilities of tokens")],
)
def test_the_loss_of_kto_is_refused_by_algorithms_on_pairs(files, algorithm, says):
    files.write(PAIR, "pairs.jsonl")
    errors = files.errors(DPO.replace("dpo:", f"{algorithm}:") + "    loss_fn: {name: kto}\n")
    assert any(f"loss_fn.name: {says}" in error for error in errors)


@pytest.mark.parametrize("key", ["desirable_weight", "undesirable_weight", "reference_policy_kl_penalty"])
def test_numbers_of_kto_must_be_above_zero(files, key):
    files.write(LABELLED, "pairs.jsonl")
    [error] = files.errors(f"{KTO}    loss_fn: {{{key}: 0}}\n")
    assert f"loss_fn.{key}: " in error


def test_supervised_training_on_pairs_is_refused(files):
    files.write(PAIR, "pairs.jsonl")
    [error] = files.errors(DPO.replace("dpo:", "sft:"))
    assert "data.train.dataset_name: preference has pairs of a chosen and a rejected answer, but sft needs prompts" in error


def test_a_token_budget_smaller_than_a_pair_is_refused(files):
    files.write(PAIR, "pairs.jsonl")
    packed = "policy: {backend: hf, model_name: m, max_total_sequence_length: 100, sequence_packing: {enabled: true, %s}}"
    text = DPO.replace("policy: {backend: hf, model_name: some/model}", packed)
    [error] = files.errors(text % "train_mb_tokens: 199")
    assert error == (
        "config.yaml:2:121: policy.sequence_packing.train_mb_tokens: 199 tokens are too few for the 2 rows that the loss "
        "compares, each of policy.max_total_sequence_length (100): raise it to 200, or lower the length."
    )
    assert files.load(text % "train_mb_tokens: 200, logprob_mb_tokens: 100").run


@pytest.mark.parametrize("key", ["prompt_config", "prompt"])
def test_a_prompt_template_that_does_not_exist_is_refused(files, good, key):
    files.write('{"question": "1+1", "expected_answer": "2"}\n', "rows.jsonl")
    rows = "  train: {dataset_name: jsonl, path: rows.jsonl%s}"
    own = rows % ", prompt: generic/mth" if key == "prompt" else (rows % "") + "\n  prompt: {prompt_config: generic/mth}"
    [error] = files.errors(good.replace("  train: {dataset_name: arithmetic}", own))
    at = "data.train.prompt" if key == "prompt" else "data.prompt.prompt_config"
    assert (
        f"{at}: there is neither a file nor a packaged prompt 'generic/mth'. Did you mean 'generic/math'? Packaged "
        f"prompts: generic/" in error
    )


def test_functions_of_data_that_do_not_exist_are_refused(files, good):
    files.write('{"question": "1+1", "expected_answer": "2"}\n', "rows.jsonl")
    data = "  train: {dataset_name: jsonl, path: rows.jsonl, record_fn: %s, processor: rl_train.data.processors.nothing}"
    first, second = files.errors(good.replace("  train: {dataset_name: arithmetic}", data % "alpacca"))
    assert "data.train.record_fn: unknown function 'alpacca'. Did you mean 'alpaca'? Use alpaca, boolq" in first
    assert (
        "data.train.processor: rl_train.data.processors.nothing cannot be imported: rl_train.data.processors has no" in second
    )


def test_an_environment_class_that_does_not_exist_is_refused_without_importing_it(files, good):
    [error] = files.errors(good.replace("arithmetic: {}", "sums: {env_cls: rl_envs.math.environment.MathEnvironmet}"))
    assert error == (
        "config.yaml:12:19: env.sums.env_cls: Environment 'rl_envs.math.environment.MathEnvironmet' cannot be imported: "
        "rl_envs.math.environment has no 'MathEnvironmet'. Did you mean 'MathEnvironment'?"
    )


def test_an_engine_without_a_common_weight_transport_is_refused(files, good):
    plain = good.replace("  backend: hf\n  model", "  backend: plain\n  model")
    assert files.load(plain).run.policy.backend == "plain"  # both support `collective`
    [error] = [line for line in files.errors(plain + "cluster: {backend: in_process}\n") if "weights" in line]
    assert error == (
        "config.yaml:7:14: policy.generation.backend: the engine 'hf' cannot receive the weights of the policy backend "
        "'plain' in one process: tried by_reference, shared_memory, acme_files; the policy backend supports collective, the "
        "engine acme_files, by_reference, collective, disk, shared_memory. Set refit_transport to collective, or change a "
        "backend."
    )


@pytest.mark.parametrize(
    ("num_nodes", "on_gpus", "is_colocated", "first"),
    [
        (1, True, True, "shared_memory"),
        (2, True, True, "shared_memory"),  # each engine process shares its GPU with a rank of the policy
        (1, True, False, "collective"),
        (2, True, False, "collective"),
        (1, False, True, "shared_memory"),
        (1, False, False, "shared_memory"),
        (2, False, True, "collective"),
        (2, None, True, "shared_memory"),  # the config may be of a cluster with GPUs
        (2, None, False, "collective"),
    ],
)
def test_weights_go_through_shared_memory_if_it_reaches_every_process_of_the_engine(num_nodes, on_gpus, is_colocated, first):
    tried = default_transports(num_nodes, on_gpus=on_gpus, is_colocated=is_colocated)
    assert (tried[0], tried[-1]) == (first, "collective")


@pytest.mark.parametrize(
    ("policy", "engine", "says"),
    [
        ("{}", "adapter", "adapter has no effect, because this policy trains no adapters. Remove it."),
        ("{}", "merged", "merged has no effect, because this policy trains no adapters. Remove it."),
        ("{lora: {use_dora: true}}", "adapter", "adapter cannot be used: policy.hf_cfg.lora.use_dora also scales each row"),
        ("{lora: {}}", "adapter", None),
        ("{lora: {use_dora: true}}", "merged", None),
    ],
)
def test_how_adapters_are_sent_fits_the_policy(files, good, policy, engine, says):
    config = good.replace("tokens: 64", f"tokens: 64\n    lora: {engine}").replace("policy:", f"policy:\n  hf_cfg: {policy}")
    if says is None:
        assert files.load(config).run.policy.generation.lora == engine
        return
    [error] = files.errors(config)
    assert says in error
    assert "policy.generation.lora" in error


def test_adapters_are_not_sent_to_an_engine_that_does_not_compute_with_them(files, good):
    config = good.replace("policy:", "policy:\n  hf_cfg: {lora: {}}").replace("    backend: hf", "    backend: remote")
    errors = "\n".join(files.errors(config.replace("tokens: 64", "tokens: 64\n    lora: adapter\n    refits: true")))
    assert "policy.generation.lora: adapter cannot be used: the engine 'remote' does not compute with adapters. Set" in errors


def test_a_refit_folder_that_no_transport_uses_is_refused(files, good):
    [error] = files.errors(good.replace("tokens: 64", "tokens: 64\n    refit_folder: /tmp"))
    assert "policy.generation.refit_folder: is only used with refit_transport: disk, but refit_transport is not set." in error
    [error] = files.errors(good.replace("tokens: 64", "tokens: 64\n    refit_transport: disk"), "cluster.num_nodes=2")
    assert "policy.generation.refit_folder is required with refit_transport: disk on 2 nodes." in error


def test_sections_that_training_does_not_use_are_refused_and_left_to_evaluations(files):
    files.write(PAIR, "pairs.jsonl")
    text = DPO + "    env:\n      math: {}\n"
    generation = "policy.generation={backend: hf}"
    first, second = files.errors(text, f"++{generation}")
    assert first.startswith("config.yaml:6:3: env: dpo does not sample or score, so the section has no effect.")
    assert "policy.generation: dpo does not sample, so no engine is started and the section has no effect." in second
    [error] = files.errors(DPO + "    rollout: {retries: 5}\n")
    assert "rollout: dpo does not sample, so the section has no effect." in error
    path = files.write(text)
    assert load_config(path, [f"++{generation}"], registry=files.registry, use=Use.EVAL).run.env


@pytest.mark.parametrize("use", [Use.EVAL, Use.COMPARE, Use.SERVE])
def test_a_command_that_samples_needs_an_engine_even_if_the_algorithm_does_not(files, use):
    files.write(PAIR, "pairs.jsonl")
    path = files.write(DPO + "    env:\n      math: {}\n")
    with pytest.raises(InvalidConfigError, match=r"policy\.generation is required"):
        load_config(path, registry=files.registry, use=use)


def test_files_may_be_missing_if_no_stage_is_checked(files):
    path = files.write(DPO)
    with pytest.raises(InvalidConfigError, match=r"pairs\.jsonl"):
        load_config(path, registry=files.registry)
    assert load_config(path, registry=files.registry, stages=()).run.algorithm_name == "dpo"


def test_supervised_training_that_scores_its_validation_uses_both_sections(files, good):
    sft = good.replace("grpo:\n  num_prompts_per_step: 8", "sft: {val_accuracy: true}")
    assert files.load(sft).run.env
    assert len(files.errors(sft.replace("true", "false"))) == 2


IN_PROCESS = {
    "cluster.num_nodes=2": "cluster.num_nodes: 2 is not supported",
    "cluster.workers_per_node=2": "cluster.workers_per_node: 2 is not supported",
    "cluster.cpus_per_worker=1": "cluster.cpus_per_worker: 1 is not supported",
    "env.arithmetic.num_workers=3": "env.arithmetic.num_workers: 3 is not supported",
    "policy.generation.num_workers=2": "policy.generation.num_workers: 2 is not supported",
    "policy.generation.python=python3": "policy.generation.python: is not supported",
    "policy.python=python3": "policy.python: is not supported",
}


@pytest.mark.parametrize("override", IN_PROCESS)
def test_the_in_process_backend_rejects_several_workers(files, good, override):
    assert files.load(good, override).run.cluster.backend == "ray"
    [error] = files.errors(good, override, "cluster.backend=in_process")
    assert f"`{override}`: {IN_PROCESS[override]}: cluster.backend is in_process" in error


def test_more_workers_than_this_machine_has_cpus_are_found(files, good, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    text = good + "cluster: {use_gpus: false, workers_per_node: 64}\n"
    loaded = files.load(text)
    with pytest.raises(InvalidConfigError) as caught:
        load_config(files.write(text), registry=files.registry, stages=(Stage.STATIC, Stage.MACHINE))
    assert str(caught.value).endswith(
        "config.yaml:13:46: cluster.workers_per_node: 64 workers with 1 CPU(s) each need 64 CPUs, but this machine has 2 "
        "CPUs. Lower it to 2, or set RAY_ADDRESS to the cluster that the run should use."
    )
    for fitting in ("cluster.workers_per_node=2", "cluster.num_nodes=2", "cluster.use_gpus=true"):
        run = files.load(yaml.safe_dump(loaded.resolved), fitting).run
        assert not [*machine_has_the_cpus.problems(CheckedConfig(run=run, registry=files.registry))]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not [*machine_has_the_cpus.problems(CheckedConfig(run=loaded.run, registry=files.registry))]


def test_a_plugin_contributes_checks_through_the_section_of_any_component(files, good):
    [error] = files.errors(good.replace("arithmetic: {}", "strict: {}"))
    assert error == "config.yaml:12:3: env.strict.num_workers: strict scores alone: set it to 2."


def test_a_resolved_config_means_the_same_for_data_and_engine(files, good):
    files.write('{"instruction": "1+1?", "output": "2"}\n', "rows.jsonl")
    text = good.replace("{dataset_name: arithmetic}", "{dataset_name: jsonl, path: rows.jsonl, record_fn: alpaca}")
    text = text.replace("  generation:", "  hf_cfg: {attn_implementation: eager}\n  generation:")
    loaded = files.load(text)
    again = load_config(files.write(loaded.to_yaml(), "resolved.yaml"), registry=files.registry)
    engines = [one.run.policy.generation.for_policy(one.run.policy) for one in (loaded, again)]
    assert engines[0].hf_cfg.attn_implementation == engines[1].hf_cfg.attn_implementation == "eager"


def test_a_class_inside_folders_without_init_files_is_found_without_importing_them(tmp_path, monkeypatch):
    folder = tmp_path / "outer_folder" / "inner_folder"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text("class Loss: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_target("outer_folder.inner_folder.module.Loss") is None
    assert "has no 'Lost'" in missing_target("outer_folder.inner_folder.module.Lost")
    assert "has no module 'modul'" in missing_target("outer_folder.inner_folder.modul.Loss")
    assert not any(name.startswith("outer_folder") for name in sys.modules)


def test_a_dataset_for_a_task_without_an_environment_is_refused(files, good):
    text = good.replace("dataset_name: arithmetic}", "dataset_name: arithmetic, task_name: sums}")
    assert files.errors(text + "  math: {}\n") == [
        "config.yaml:10:48: data.train.task_name: `env` has no task 'sums'. Tasks in `env`: arithmetic, math."
    ]
    assert files.load(text.replace("  arithmetic: {}", "  sums: {name: arithmetic}")).run.data.train.task_name == "sums"


def test_the_task_of_validation_data_is_checked_if_the_run_validates(files, good):
    text = good.replace("env:", "  validation: {dataset_name: arithmetic, task_name: sums}\nenv:")
    assert files.load(text).run.data.validation.task_name == "sums"
    assert files.errors(text, "grpo.val_period=5") == [
        "config.yaml:11:53: data.validation.task_name: `env` has no task 'sums'. Tasks in `env`: arithmetic."
    ]
    with pytest.raises(InvalidConfigError, match=r"data\.validation\.task_name"):
        load_config(files.write(text), registry=files.registry, use=Use.EVAL)


@pytest.mark.parametrize(
    ("env", "key"), [("reward_fn: statistics.mean", "reward_fn"), ("reward_fns: {std: os.path.join}", "reward_fns.std")]
)
def test_a_reward_function_with_the_name_of_a_built_in_metric_is_refused(files, good, env, key):
    [error] = files.errors(good.replace("arithmetic: {}", f"arithmetic: {{{env}}}"))
    assert f"env.arithmetic.{key}: the name '{'mean' if key == 'reward_fn' else 'std'}' is reserved" in error


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_quantized_weights_that_would_all_be_trained_are_refused(files, good, key):
    python = "  python: python3\n  hf_cfg:"  # libraries of another interpreter are not checked
    [error] = files.errors(good.replace("  generation:", f"{python} {{{key}: true}}\n  generation:"))
    assert f"policy.hf_cfg.{key}: all weights are trained, but quantized weights have no gradients." in error
    assert files.load(good.replace("  generation:", f"{python} {{{key}: true, lora: {{}}}}\n  generation:")).run
