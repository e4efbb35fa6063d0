"""What a run changes in a model for itself is not in its checkpoints and exports, and what cannot be written is found early."""

import json
from pathlib import Path

import model_folders
import pytest
from command_line import rlcore
from model_folders import byte_level, edit_json, make, unigram, write_tokenizer
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_core.errors import CheckpointWriteError
from rl_train.checkpoints.inputs import ComparedConfig
from rl_train.checkpoints.published_files import carry_over_tokenizer
from rl_train.checkpoints.state import Checkpoints
from rl_train.checkpoints.store import CheckpointStore
from rl_train.data.processors import load_policy_tokenizer

_GREETING = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_WITH_SWITCH = _GREETING + "{% if thinking %}<think>{% endif %}"
_NO_SAMPLING = {"do_sample": False, "temperature": 0.7, "top_p": 0.9}


def _byte_level_with_digits(folder):
    tokenizer = byte_level()
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits)
    write_tokenizer(folder, tokenizer, tokenizer_class="GPT2Tokenizer")


def _padding_in_the_file(folder):
    tokenizer = byte_level()
    tokenizer.enable_padding(direction="left", pad_id=2, pad_token="</s>")
    tokenizer.enable_truncation(max_length=8)
    write_tokenizer(folder, tokenizer, pad_token=None)


def _template_file(folder):
    write_tokenizer(folder, chat_template=None)
    (folder / "chat_template.jinja").write_text(_WITH_SWITCH)


def _named_templates(folder):
    _template_file(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text(_WITH_SWITCH + "!")


def _special_tokens_map(folder):
    write_tokenizer(folder, eos_token=None, pad_token=None)
    edit_json(folder / "special_tokens_map.json", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])


def _vocabulary_and_merges(folder):
    byte_level().model.save(str(folder))
    end = {"eos_token": "<|im_end|>", "unk_token": "<unk>", "bos_token": "<s>"}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", **end)


TOKENIZERS = {
    "plain": write_tokenizer,
    "left padding": lambda folder: write_tokenizer(folder, padding_side="left"),
    "no padding token": lambda folder: write_tokenizer(folder, pad_token=None),
    "start token": lambda folder: write_tokenizer(folder, byte_level(start=True)),
    "unigram, cleaned up": lambda folder: write_tokenizer(folder, unigram(), clean_up_tokenization_spaces=True),
    "another class": lambda folder: write_tokenizer(folder, byte_level(start=True), tokenizer_class="LlamaTokenizerFast"),
    "digits": _byte_level_with_digits,
    "padding and truncation in tokenizer.json": _padding_in_the_file,
    "template in its config": lambda folder: write_tokenizer(folder, chat_template=_WITH_SWITCH),
    "template in a file": _template_file,
    "named templates": _named_templates,
    "special tokens map": _special_tokens_map,
    "vocabulary and merges": _vocabulary_and_merges,
}
MODELS = (
    *("untied", "Llama 2's generation config", "no generation config", "no pad token", "custom class name", "sharded"),
    *("rope scaling", "old names of fields"),
)


@pytest.fixture(params=TOKENIZERS)
def tokenizer_folder(request, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    TOKENIZERS[request.param](folder)
    return folder


def make_model(folder, form):
    if form in model_folders.FORMS:
        return make(folder, form)
    make(folder)
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    if form == "rope scaling":
        edit_json(folder / "config.json", rope_parameters={**rope, "rope_theta": 5e5}, acme_field=[1, 2])
    else:
        names = {"rope_theta": 5e5, "rope_scaling": rope, "torch_dtype": "float32", "dtype": None, "rope_parameters": None}
        edit_json(folder / "config.json", transformers_version="4.44.0", **names)
    return folder


def tokenizer_files(folder):
    """Content of all files of a folder that are not the model's."""
    own = ("model", "config.json", "generation_config.json")
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(own)]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def config_as_read(folder):
    fields = AutoConfig.from_pretrained(folder).to_dict()
    return {name: value for name, value in fields.items() if name not in ("_name_or_path", "transformers_version")}


def checkpoints_of(folder, policy, tokenizer, base):
    return Checkpoints(
        store=CheckpointStore(folder / "checkpoints"),
        models={"policy": policy},
        model_names={"policy": str(base)},
        parts={},
        config=ComparedConfig(values={}, algorithm="sft"),
        save_optimizer=False,
        tokenizer=tokenizer,
    )


def sft(base, runs, **policy):
    texts = [("user", "1+2"), ("assistant", "3")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in texts]}] * 8
    data = runs.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "policy": {
            "backend": "hf",
            "model_name": str(base),
            "max_total_sequence_length": 96,
            "train_global_batch_size": 4,
            "optimizer": {"kwargs": {"lr": 0.001}},
            **policy,
        },
        "sft": {"max_num_steps": 2, "global_batch_size": 4, "val_at_end": False, "val_period": 0},
        "data": {"train": {"dataset_name": "jsonl", "path": str(data), "input_key": "messages", "output_key": None}},
        "checkpointing": {"save_period": 2},
        "cluster": {"backend": "in_process"},
        "logger": {"log_dir": str(runs)},
    }
    path = runs.parent / "sft.yaml"
    path.write_text(json.dumps(config))
    return path


def test_a_tokenizer_is_saved_with_the_files_that_were_published(tokenizer_folder, tmp_path):
    tokenizer = load_policy_tokenizer(HFPolicyConfig(model_name=str(tokenizer_folder)))
    assert (tokenizer.padding_side, tokenizer.pad_token is None) == ("right", False)
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')  # of another tokenizer
    carry_over_tokenizer(tokenizer, saved)
    assert tokenizer_files(saved) == tokenizer_files(tokenizer_folder)


@pytest.mark.parametrize("section", [{"chat_template": _GREETING}, {"chat_template_kwargs": {"thinking": True}}])
@pytest.mark.parametrize("form", ["template in its config", "template in a file", "named templates"])
def test_a_template_of_the_config_is_saved_and_nothing_else_changes(form, section, tmp_path):
    base, saved = tmp_path / "base", tmp_path / "saved"
    base.mkdir()
    saved.mkdir()
    TOKENIZERS[form](base)
    tokenizer = load_policy_tokenizer(HFPolicyConfig(model_name=str(base), tokenizer=section))
    carry_over_tokenizer(tokenizer, saved)
    read = AutoTokenizer.from_pretrained(saved)
    assert read.chat_template == tokenizer.chat_template != AutoTokenizer.from_pretrained(base).chat_template
    assert (saved / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    settings = [json.loads((folder / "tokenizer_config.json").read_text()) for folder in (base, saved)]
    assert settings[1] == {name: value for name, value in settings[0].items() if name != "chat_template"}


@pytest.mark.parametrize("form", MODELS)
def test_a_checkpoint_has_the_configs_that_were_published(form, tmp_path):
    base = make_model(tmp_path / "base", form)
    policy = HuggingFacePolicy(str(base), precision="float32")
    checkpoints = checkpoints_of(tmp_path, policy, load_policy_tokenizer(policy.config), base)
    for step in (1, 2):
        weights = checkpoints.save(step, {}) / "policy" / "weights"
        assert tokenizer_files(weights) == tokenizer_files(base)
        assert json.loads((weights / "config.json").read_text()) == json.loads((base / "config.json").read_text())
        written, published = weights / "generation_config.json", base / "generation_config.json"
        assert written.exists() == published.exists()
        assert not written.exists() or written.read_bytes() == published.read_bytes()


def test_a_checkpoint_has_the_fields_that_the_config_of_the_run_changes(tmp_path):
    base = make_model(tmp_path / "base", "old names of fields")
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    overrides = {"attention_dropout": 0.25, "rope_parameters": rope}
    policy = HuggingFacePolicy(str(base), precision="bfloat16", hf_cfg={"config_overrides": overrides})
    checkpoints = checkpoints_of(tmp_path, policy, load_policy_tokenizer(policy.config), base)
    weights = checkpoints.save(1, {}) / "policy" / "weights"
    expected = {**config_as_read(base), "dtype": "bfloat16", "attention_dropout": 0.25, "rope_parameters": rope}
    assert config_as_read(weights) == expected
    policy = HuggingFacePolicy(str(base), precision="bfloat16")
    checkpoints = checkpoints_of(tmp_path, policy, load_policy_tokenizer(policy.config), base)
    config = json.loads((checkpoints.save(2, {}) / "policy" / "weights" / "config.json").read_text())
    assert config == {**json.loads((base / "config.json").read_text()), "torch_dtype": "bfloat16"}


def test_a_value_model_is_saved_as_a_classifier_with_the_other_fields_of_its_base(tmp_path):
    base = make_model(tmp_path / "base", "custom class name")
    critic = HuggingFacePolicy(str(base), precision="float32", head="scalar")
    checkpoints = checkpoints_of(tmp_path, critic, load_policy_tokenizer(critic.config), base)
    weights = checkpoints.save(1, {}) / "policy" / "weights"
    read, published = config_as_read(weights), config_as_read(base)
    assert read.pop("architectures") == ["LlamaForSequenceClassification"]
    assert {name for name in read if read[name] != published.get(name)} == {"id2label", "label2id"}
    assert tokenizer_files(weights) == tokenizer_files(base)


def test_a_run_trains_resumes_and_exports_a_model_whose_padding_and_generation_config_it_cannot_use(tmp_path):
    base = make(tmp_path / "base", "left padding")
    edit_json(base / "tokenizer_config.json", pad_token=None)
    edit_json(base / "generation_config.json", **_NO_SAMPLING)
    config = sft(base, tmp_path / "runs")
    assert rlcore("train", config).returncode == 0
    again = rlcore("train", config, "sft.max_num_steps=3")
    assert again.returncode == 0, again.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert rlcore("convert", run, tmp_path / "exported").returncode == 0
    for folder in (run / "checkpoints" / "step_000003" / "policy" / "weights", tmp_path / "exported"):
        assert tokenizer_files(folder) == tokenizer_files(base)
        assert (folder / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
        assert config_as_read(folder) == config_as_read(base)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert (model.generation_config.do_sample, model.generation_config.temperature) == (False, 0.7)


def test_merged_adapters_have_the_files_of_their_base(tmp_path):
    base = make_model(tmp_path / "base", "old names of fields")
    edit_json(base / "generation_config.json", **_NO_SAMPLING)
    config = sft(base, tmp_path / "runs", hf_cfg={"lora": {"rank": 2}}, precision="float32")
    assert rlcore("train", config).returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    merged = rlcore("convert", run, tmp_path / "merged", "--merge")
    assert merged.returncode == 0, merged.stderr
    assert tokenizer_files(tmp_path / "merged") == tokenizer_files(base)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "merged" / name).read_text()) == json.loads((base / name).read_text())


def test_what_a_checkpoint_needs_is_written_and_removed_before_the_first_step(tmp_path):
    base = make(tmp_path / "base")
    policy = HuggingFacePolicy(str(base), precision="float32", hf_cfg={"lora": {"rank": 2}})
    checkpoints = checkpoints_of(tmp_path, policy, load_policy_tokenizer(policy.config), base)
    seen = {}
    carry_on = policy.try_save

    def watched(weights):
        carry_on(weights)
        seen[Path(weights).relative_to(tmp_path).as_posix()] = sorted(path.name for path in Path(weights).iterdir())

    policy.try_save = watched
    checkpoints.try_save()
    assert seen == {"checkpoints/step_000000.partial/policy/weights": ["adapter_config.json"]}
    assert not any((tmp_path / "checkpoints").iterdir())


def test_a_config_that_cannot_be_written_ends_the_run_before_its_first_step(tmp_path, monkeypatch):
    base = make(tmp_path / "base")

    def refuse(self, folder):
        raise TypeError("Object of type dtype is not JSON serializable")

    monkeypatch.setattr(AutoConfig.from_pretrained(base).__class__, "save_pretrained", refuse)
    result = rlcore("train", sft(base, tmp_path / "runs"))
    assert result.returncode != 0
    assert "This was tried before the first step" in result.stderr
    assert "TypeError: Object of type dtype is not JSON serializable" in result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text()


def test_a_state_that_is_not_json_is_refused_before_the_first_step(tmp_path):
    class Part:
        def state_dict(self):
            return {"random": object()}

        def load_state_dict(self, state):
            raise AssertionError(state)

    base = make(tmp_path / "base")
    checkpoints = checkpoints_of(tmp_path, HuggingFacePolicy(str(base)), AutoTokenizer.from_pretrained(base), base)
    checkpoints.parts = {"sampler": Part()}
    with pytest.raises(CheckpointWriteError, match="Object of type object is not JSON serializable"):
        checkpoints.try_save()
    assert not any((tmp_path / "checkpoints").iterdir())
