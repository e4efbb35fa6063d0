"""Lengths beyond a model's positions are refused, or reported if the model has rotary embeddings."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from later_rules import report_of
from transformers import GPT2Config, GPT2LMHeadModel

from rl_backends_base.config import TokenwiseConfig
from rl_backends_hf.config import HFGenerationConfig
from rl_core.config.schema import TokenizerConfig
from rl_core.errors import ConfigError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.checks import warn_about_engine_limit
from rl_train.assembly.rules import check_before_start
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.config.loader import load_config
from rl_train.config.rules.rule import CheckedConfig
from rl_train.data.processors import engine_tokenizer
from rl_train.launch.train import train

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a GRPO config with these keys of the model's config and of the policy."""
    monkeypatch.chdir(tmp_path)

    def of(model: dict, generation: dict | None = None, *, learned: bool = False, **policy):
        folder = tmp_path / "model"
        shutil.copytree(MODEL, folder)
        if learned:
            learned_positions = GPT2Config(vocab_size=18, n_positions=128, n_embd=8, n_layer=1, n_head=1)
            GPT2LMHeadModel(learned_positions).save_pretrained(folder)
        else:
            config = json.loads((MODEL / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, **model}))
        sections = {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 1},
            "policy": {
                "backend": "hf",
                "model_name": "model",
                "generation": {"backend": "hf", "max_new_tokens": 4, **(generation or {})},
                **policy,
            },
            "data": {"train": {"dataset_name": "arithmetic"}},
            "env": {"arithmetic": {}},
            "cluster": {"backend": "in_process"},
        }
        (tmp_path / "config.yaml").write_text(json.dumps(sections, indent=1))
        return load_config(tmp_path / "config.yaml", registry=Registry(discover()))

    return of


def found(findings) -> dict[str, str]:
    return {".".join(map(str, problem.path)): problem.message for problem in findings}


@pytest.mark.slow
def test_more_tokens_than_learned_positions_are_refused_by_validate_and_at_the_start(load, tmp_path):
    loaded = load({}, learned=True, max_total_sequence_length=129)
    message = found(report_of(loaded).problems)["policy.max_total_sequence_length"]
    assert message.startswith("129 tokens are more than the 128 positions (`max_position_embeddings`) of ")
    assert "Lower it to 128 or less" in message
    with pytest.raises(ConfigError, match=r"config.yaml:\d+:\d+: policy.max_total_sequence_length: 129 tokens"):
        train(tmp_path / "config.yaml", console=False)


@pytest.mark.slow
def test_as_many_tokens_as_positions_are_accepted(load):
    loaded = load({}, learned=True, max_total_sequence_length=128)
    assert not found(report_of(loaded).problems)
    assert not found(report_of(loaded).warnings)


@pytest.mark.slow
def test_more_tokens_than_rotary_positions_are_a_warning_of_validate_and_of_the_run(load, caplog):
    loaded = load({}, max_total_sequence_length=129)
    assert not found(report_of(loaded).problems)
    warning = found(report_of(loaded).warnings)["policy.max_total_sequence_length"]
    assert warning.startswith("129 tokens are more than the 128 positions (`max_position_embeddings`) ")
    check_before_start(RunFacts.of(CheckedConfig(run=loaded.run, registry=Registry(discover()))))
    assert caplog.text.count("128 positions") == 1
    assert "policy.max_total_sequence_length: 129 tokens" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 16}, 128),
    ],
)
def test_scaled_rotary_embeddings_extend_the_positions(load, rope, limit):
    extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope["rope_type"] == "llama3" else {}
    loaded = load({"rope_parameters": {"rope_theta": 10000.0, **rope, **extra}}, max_total_sequence_length=limit)
    assert not found(report_of(loaded).warnings)
    longer = loaded.run.policy.model_copy(update={"max_total_sequence_length": limit + 1})
    loaded = type(loaded)(**{**vars(loaded), "run": loaded.run.model_copy(update={"policy": longer})})
    assert f"more than the {limit} positions" in found(report_of(loaded).warnings)["policy.max_total_sequence_length"]


def test_config_overrides_of_the_model_are_applied(load):
    overrides = {"config_overrides": {"max_position_embeddings": 256}}
    assert not found(report_of(load({}, max_total_sequence_length=256, hf_cfg=overrides)).warnings)


def test_the_length_limit_of_the_engine_is_checked_too(load):
    loaded = load({}, {"hf_cfg": {"max_model_len": 300}}, max_total_sequence_length=128)
    assert (
        "300 tokens are more than the 128 positions"
        in found(report_of(loaded).warnings)["policy.generation.hf_cfg.max_model_len"]
    )


@pytest.mark.slow
def test_an_engine_that_stops_rows_before_the_configured_length_is_reported(load, tmp_path, caplog):
    load({}, max_total_sequence_length=140)
    train(tmp_path / "config.yaml", console=False)
    assert "the engine ends rows at 128 tokens, before policy.max_total_sequence_length (140)" in caplog.text


def test_an_engine_that_is_limited_by_its_own_key_is_as_intended(load, tmp_path, caplog):
    load({}, {"hf_cfg": {"max_model_len": 20}}, max_total_sequence_length=32)
    train(tmp_path / "config.yaml", console=False)
    assert "the engine ends rows" not in caplog.text


def test_the_limit_of_an_engine_on_the_base_class_is_its_own_key_as_well(load, caplog):
    run = load({}, max_total_sequence_length=32).run
    for own in (20, None):
        engine = TokenwiseConfig(backend="x", max_new_tokens=4, max_model_len=own)
        policy = run.policy.model_copy(update={"generation": engine})
        warn_about_engine_limit(run.model_copy(update={"policy": policy}), SimpleNamespace(facts={"max_model_len": 20}))
        assert ("the engine ends rows at 20 tokens" in caplog.text) == (own is None)


def test_the_tokenizer_of_an_engine_is_that_of_its_section_or_of_the_section_of_its_backend():
    named = TokenizerConfig(name="somewhere:Bytes")
    assert engine_tokenizer(TokenwiseConfig(backend="x", max_new_tokens=4, tokenizer=named)) == named
    of_backend = {"tokenizer": {"name": "somewhere:Bytes"}}
    assert engine_tokenizer(HFGenerationConfig(backend="hf", max_new_tokens=4, hf_cfg=of_backend)) == named
    assert engine_tokenizer(HFGenerationConfig(backend="hf", max_new_tokens=4)) is None
