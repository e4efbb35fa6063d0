"""The page on NeMo RL: its import paths exist, and each of its differences has a test."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nemo_rl_names.md").read_text()
TABLE = PAGE.partition("## Import paths")[2].partition("## Differences")[0]
PATHS = dict(re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", TABLE, flags=re.MULTILINE))


def test_every_row_of_the_table_is_read():
    assert len(PATHS) == TABLE.count("\n| `") > 30


@pytest.mark.parametrize(("theirs", "ours"), PATHS.items())
def test_the_import_path_exists_and_keeps_the_name(theirs, ours):
    module, _, name = ours.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    assert theirs.rpartition(".")[2] == name


CALLS, LAYERED = "tests/e2e/test_promised_calls.py", "tests/cli/test_layered_configs.py"
DIFFERENCES = {
    "Abstract methods": (CALLS, "test_a_custom_policy_with_generate_and_train_only_says_which_method_is_missing"),
    "`PendingCall`": (CALLS, "test_collectives_return_pending_calls"),
    "Reference log-probabilities": (CALLS, "test_engine_output_can_be_scored_unchanged"),
    "`__extra__`": (CALLS, "test_the_specifications_have_the_documented_keys"),
    "Configs": (CALLS, "test_a_generation_config_reads_as_a_dictionary"),
    "`top_p` below 1": (LAYERED, "test_top_p_is_the_only_refused_line"),
    "`repetition_penalty`": (CALLS, "test_the_generation_configuration_of_the_reference_samples"),
    "`eos_token_id`": (
        "tests/train/config/test_config_transformers_keys.py",
        "test_another_end_of_sequence_token_is_an_error_that_names_the_key_for_further_tokens",
    ),
    "`backend: openai` in training": (
        LAYERED,
        "test_a_server_with_its_own_weights_is_refused_for_training_and_accepted_for_evaluation",
    ),
    "`policy.train(generations, rewards)`": (CALLS, "test_rewards_passed_as_a_loss_are_an_error"),
    "Columns of a loss": (CALLS, "test_a_loss_lists_the_columns_that_the_batch_lacks"),
    "`environment.step(generations)`": (
        CALLS,
        "test_an_environment_called_with_generations_of_token_ids_explains_the_arguments_of_step",
    ),
    "Small datasets": (CALLS, "test_a_dpo_trainer_trains_on_fewer_records_than_the_default_batch"),
    "`VllmGenerationWorker`": (
        "tests/backends_vllm/test_config.py",
        "test_a_worker_with_a_model_starts_at_the_first_call_and_stops",
    ),
    "Diagnostics": (CALLS, "test_the_diagnostics_of_the_reference_take_the_name_of_a_model"),
}


def test_each_difference_of_the_page_has_a_test():
    assert re.findall(r"^- \*\*(.+?)\*\*:", PAGE.partition("## Differences")[2], flags=re.MULTILINE) == list(DIFFERENCES)
    for file, test in DIFFERENCES.values():
        assert f"def {test}(" in (ROOT / file).read_text()
