"""`rlcore convert`: a checkpoint becomes a folder that other libraries load, or an error with a reason."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import rlcore
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import CheckpointError, NotSupportedError, UserError
from rl_core.interfaces.conversion import Conversion
from rl_core.interfaces.worker_context import WorkerContext
from rl_core.plugins import Component
from rl_core.plugins.component import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.checkpoints.manifest import write_manifest
from rl_train.launch.train import train
from rl_train.run_folders.convert import convert

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "addition" / "model"


def short_run(folder, policy):
    """The step folder of two steps of supervised training in this process."""
    config = {
        "sft": {"max_num_steps": 2, "global_batch_size": 8},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "optimizer": {"kwargs": {"lr": 1e-3}},
            **policy,
        },
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 32, "with_response": True}},
        "cluster": {"backend": "in_process"},
        "logger": {"log_dir": str(folder)},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return train(folder / "run.yaml", console=False).folder / "checkpoints" / "step_000002"


@pytest.fixture(scope="module")
def peft():
    return importlib.import_module("peft")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of a run that trained all weights."""
    return short_run(tmp_path_factory.mktemp("whole"), {})


@pytest.fixture(scope="module")
def adapted(peft, tmp_path_factory):
    """A checkpoint of a run that trained adapters on a bfloat16 base."""
    lora = {"rank": 4, "alpha": 32, "target_modules": ["q_proj", "up_proj"]}
    return short_run(tmp_path_factory.mktemp("adapted"), {"hf_cfg": {"lora": lora}, "precision": "bfloat16"})


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_checkpoint_of_full_weights_is_copied_unchanged(whole, tmp_path):
    done = convert(whole, tmp_path / "out", to="hf")
    assert files(tmp_path / "out") == files(whole / "policy" / "weights")
    assert done.num_bytes == sum(map(len, files(tmp_path / "out").values()))
    assert set(done.files) == set(files(tmp_path / "out"))
    # Without an adapter, merging changes nothing.
    convert(whole, tmp_path / "merged", to="hf", merge=True)
    assert files(tmp_path / "merged") == files(tmp_path / "out")


def test_plain_peft_loads_the_exported_adapter(peft, adapted, tmp_path):
    convert(adapted, tmp_path / "out", to="hf", adapter=True)
    convert(adapted, tmp_path / "default", to="hf")
    assert files(tmp_path / "default") == files(tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    assert peft.PeftConfig.from_pretrained(tmp_path / "out").base_model_name_or_path == str(MODEL)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    moved = [name for name, tensor in model.named_parameters() if "lora_B" in name and bool(tensor.abs().sum() > 0)]
    assert len(moved) == 2 * base.config.num_hidden_layers


def test_the_merged_folder_equals_weights_merged_by_peft_and_sent_in_a_refit(peft, adapted, tmp_path):
    convert(adapted, tmp_path / "out", to="hf", merge=True)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    expected = peft.PeftModel.from_pretrained(base.float(), adapted / "policy" / "weights").merge_and_unload()
    original = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    changed = 0
    for name, tensor in found.named_parameters():
        assert torch.equal(tensor, expected.get_parameter(name).to(torch.bfloat16)), name
        changed += not torch.equal(tensor, original.get_parameter(name))
    assert changed == 2 * base.config.num_hidden_layers
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == AutoTokenizer.from_pretrained(MODEL).get_vocab()
    policy = json.loads((adapted / "state.json").read_text())["config"]["policy"]
    worker = HFPolicyWorker(one_process(), HFPolicyConfig.model_validate(policy))
    worker.setup()
    worker.load_checkpoint(adapted / "policy" / "weights", None)
    for name, tensor in worker.iter_weights():
        assert torch.equal(tensor, found.get_parameter(name)), name
    # A whole model again: it trains like any other.
    HFPolicyWorker(one_process(), HFPolicyConfig(model_name=str(tmp_path / "out"))).setup()


def one_process():
    return WorkerContext(
        rank=0, world_size=1, local_rank=0, node_rank=0, master_address="127.0.0.1", master_port=0, run_in_process=True
    )


def test_a_base_that_has_moved_is_named_by_an_option(peft, adapted, tmp_path):
    state = json.loads((adapted / "state.json").read_text())
    state["config"]["policy"]["model_name"] = "/nowhere/model"
    moved = tmp_path / "step_000002"
    (moved / "policy").mkdir(parents=True)
    (moved / "policy" / "weights").symlink_to(adapted / "policy" / "weights")
    (moved / "state.json").write_text(json.dumps(state))
    write_manifest(moved, step=2, metrics={})
    with pytest.raises(UserError, match="'/nowhere/model' does not exist"):
        convert(moved, tmp_path / "out", to="hf", merge=True)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
    convert(moved, tmp_path / "out", to="hf", merge=True, model=str(MODEL))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


def test_the_command_lists_the_files_written(peft, adapted, tmp_path):
    result = rlcore("convert", adapted, tmp_path / "out", "--to", "hf", "--merge")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"Wrote {tmp_path / 'out'}: ")
    assert "  model.safetensors\n" in result.stdout
    assert sorted(line.strip() for line in result.stdout.splitlines()[1:-3]) == sorted(files(tmp_path / "out"))
    assert result.stdout.endswith(
        f"Next:\n  rlcore chat {tmp_path / 'out'} --backend hf\n  rlcore serve {tmp_path / 'out'} --backend hf\n"
    )


def test_only_an_adapter_can_be_exported_as_an_adapter(whole, tmp_path):
    result = rlcore("convert", whole, tmp_path / "out", "--to", "hf", "--adapter")
    assert (result.returncode, result.stdout) == (2, "")
    said = " ".join(result.stderr.split())
    assert "contains the weights of a full model and no adapter. Convert it without --adapter." in said
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"--adapter writes only the adapter, and --merge a full model\. Use one of them"):
        convert(whole, tmp_path / "out", to="hf", adapter=True, merge=True)


def test_the_command_exits_with_code_2_if_conversion_is_impossible(tmp_path):
    result = rlcore("convert", tmp_path, tmp_path / "out")
    assert result.returncode == 2
    assert "manifest.json" in result.stderr
    assert "Traceback" not in result.stderr
    (tmp_path / "checkpoints").mkdir()
    result = rlcore("convert", tmp_path, tmp_path / "out")
    assert result.returncode == 2
    assert f"{tmp_path} has no complete checkpoint" in result.stderr


def test_a_run_folder_is_converted_from_its_newest_checkpoint(whole, tmp_path):
    run = whole.parent.parent
    result = rlcore("convert", run, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"Newest checkpoint of {run}: {whole}\n")
    assert files(tmp_path / "out") == files(whole / "policy" / "weights")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / whole.name / "manifest.json").unlink()
    result = rlcore("convert", copy, tmp_path / "other")
    assert result.returncode == 2
    assert "manifest.json" in result.stderr


def test_wrong_input_is_explained_and_leaves_nothing_behind(whole, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        convert(whole, taken, to="hf")
    with pytest.raises(NotSupportedError, match=r"'hf' does not convert to 'hff'\. Did you mean 'hf'"):
        convert(whole, tmp_path / "out", to="hff")
    with pytest.raises(CheckpointError, match="does not exist"):
        convert(tmp_path / "absent", tmp_path / "out", to="hf")
    with pytest.raises(NotSupportedError, match=r"no format 'nobody'.*can be converted to: hf, megatron"):
        convert(MODEL, tmp_path / "out", to="nobody")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]
    assert files(taken) == {"mine.txt": b"mine"}


def with_tensors(change, folder):
    """A copy of the model with changed tensors."""
    shutil.copytree(MODEL, folder)
    tensors = load_file(MODEL / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NAME = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop(NAME), f"{NAME}: missing"),
        (
            lambda tensors: tensors.update({NAME: tensors[NAME][:-1].clone()}),
            rf"{NAME}: has shape \(767, 192\), but the model needs \(768, 192\)",
        ),
    ],
)
def test_a_model_with_missing_or_misshapen_tensors_is_refused(tmp_path, change, problem, capfd):
    with_tensors(change, tmp_path / "model")
    with pytest.raises(CheckpointError, match=problem):
        convert(tmp_path / "model", tmp_path / "out", to="hf")
    assert capfd.readouterr().err == "", "no report of Transformers"
    assert not (tmp_path / "out").exists()


def test_a_corrupt_or_absent_weights_file_is_refused(tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is incomplete or corrupt"):
        convert(tmp_path / "model", tmp_path / "out", to="hf")
    weights.rename(weights.with_name("pytorch_model.bin"))  # pickles are not copied, and not opened
    with pytest.raises(CheckpointError, match="has no weights in safetensors files"):
        convert(tmp_path / "model", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def test_code_pickles_and_documents_are_left_out_and_needed_code_is_named(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "additional_chat_templates").mkdir()
    for name in ("modeling_sums.py", "layers.py", "training_args.bin", "README.md", "additional_chat_templates/tools.jinja"):
        (model / name).write_text("")
    done = convert(model, tmp_path / "out", to="hf")
    assert done.left_out == ("README.md", "layers.py", "modeling_sums.py", "training_args.bin")
    assert done.needed_code == ()
    assert set(done.files) == {*files(MODEL), "additional_chat_templates/tools.jinja"}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "modeling_sums.Config"}}))
    said = rlcore("convert", model, tmp_path / "again").stdout
    assert "Left out, because only weights, config, tokenizer and templates are written: README.md, layers.py" in said
    assert "The model needs layers.py, modeling_sums.py, which a config names in `auto_map`." in said
    assert not list((tmp_path / "again").glob("*.py"))


class Sideways:
    """A policy backend of another distribution that has its own format."""

    checkpoint_conversions = {"sideways": f"{__name__}:sideways"}  # noqa: RUF012


def sideways(conversion: Conversion) -> None:
    (conversion.output / "said.json").write_text(json.dumps([str(conversion.source), dict(conversion.policy)]))


class OneBackend(Registry):
    """The registry, with one policy backend more."""

    def find(self, kind, name, *, requires=()):
        if (kind, name) == (Kind.POLICY, "sideways"):
            return Component("sideways", target=f"{__name__}:Sideways", summary="a test")
        return super().find(kind, name, requires=requires)


@pytest.fixture
def registry():
    return OneBackend(discover())


def test_the_backend_of_a_format_s_name_converts_a_plain_folder(registry, tmp_path):
    done = convert(MODEL, tmp_path / "out", to="sideways", registry=registry)
    assert json.loads((tmp_path / "out" / "said.json").read_text()) == [str(MODEL), {}]
    assert (done.files, done.backend) == (("said.json",), "sideways")
    convert(MODEL, tmp_path / "copy", to="hf", registry=registry)
    assert files(tmp_path / "copy") == files(MODEL)


def test_a_checkpoint_is_converted_by_the_backend_that_wrote_it(registry, whole, tmp_path):
    state = json.loads((whole / "state.json").read_text())
    state["config"]["policy"] = {"backend": "sideways", "sideways_cfg": {"width": 3}}
    (tmp_path / "step_000002").mkdir()
    (tmp_path / "step_000002" / "policy").symlink_to(whole / "policy")
    (tmp_path / "step_000002" / "state.json").write_text(json.dumps(state))
    write_manifest(tmp_path / "step_000002", step=2, metrics={})
    convert(tmp_path / "step_000002", tmp_path / "out", to="sideways", registry=registry)
    said = json.loads((tmp_path / "out" / "said.json").read_text())
    assert said == [str(tmp_path / "step_000002" / "policy" / "weights"), state["config"]["policy"]]
    # Its weights are a folder of Transformers, which needs no function.
    convert(tmp_path / "step_000002", tmp_path / "copy", to="hf", registry=registry)
    assert files(tmp_path / "copy") == files(whole / "policy" / "weights")
    with pytest.raises(NotSupportedError, match="It converts to: hf, sideways"):
        convert(tmp_path / "step_000002", tmp_path / "else", to="upright", registry=registry)


def saved_by(backend, state, folder, files):
    """The step folder of a run of this backend, which has saved these files."""
    weights = folder / "step_000002" / "policy" / "weights"
    weights.mkdir(parents=True)
    for name, text in files.items():
        (weights / name).write_text(text)
    changed = {**state, "config": {"policy": {"backend": backend}}}
    (folder / "step_000002" / "state.json").write_text(json.dumps(changed))
    write_manifest(folder / "step_000002", step=2, metrics={})
    return folder / "step_000002"


class Plain:
    """A policy backend of another distribution without conversions."""


def test_the_own_format_of_a_backend_is_what_it_saved(whole, tmp_path):
    class Registered(Registry):
        def find(self, kind, name, *, requires=()):
            return Component("plain", target=f"{__name__}:Plain", summary="a test")

    # `config.json` of a library that is not Transformers
    saved = {"config.json": '{"width": 3}', "model.pth": "weights", "words.txt": "a b"}
    step = saved_by("plain", json.loads((whole / "state.json").read_text()), tmp_path, saved)
    done = convert(step, tmp_path / "out", to="plain", registry=Registered(discover()))
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == saved
    assert (done.backend, done.left_out, done.needed_code) == (None, (), ())
    with pytest.raises(
        NotSupportedError, match=r"does not convert to 'hf'\. It converts to: plain\..*config.json of Transformers"
    ):
        convert(step, tmp_path / "copy", to="hf", registry=Registered(discover()))
    assert not (tmp_path / "copy").exists()


def test_weights_in_the_format_of_a_third_party_are_converted_to_its_formats_only(registry, whole, tmp_path):
    step = tmp_path / "step_000002"
    (step / "policy" / "weights").mkdir(parents=True)
    (step / "policy" / "weights" / "parameters.bin").write_bytes(b"weights")
    state = json.loads((whole / "state.json").read_text())
    (step / "state.json").write_text(json.dumps(state | {"config": {"policy": {"backend": "sideways"}}}))
    write_manifest(step, step=2, metrics={})
    done = convert(step, tmp_path / "out", to="sideways", registry=registry)
    assert (done.files, done.backend) == (("said.json",), "sideways")
    with pytest.raises(NotSupportedError) as caught:
        convert(step, tmp_path / "copy", to="hf", registry=registry)
    assert str(caught.value) == (
        "The policy backend 'sideways' does not convert to 'hf'. It converts to: sideways. Its weights are not in Hugging Face "
        f"format: {step / 'policy' / 'weights'} has no config.json of Transformers. A backend names its conversions in "
        "`checkpoint_conversions` (docs/convert.md)."
    )
    assert not (tmp_path / "copy").exists()
