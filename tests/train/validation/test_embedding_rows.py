"""Untrained rows are reported with ids and texts, and tying is compared with the weights that the policy sends."""

import pytest
import torch

from rl_core.errors import NotSupportedError
from rl_train.diagnostics.diagnosis import DiagnosisStatus
from rl_train.diagnostics.embeddings import (
    check_tied_embeddings,
    check_token_rows,
    check_untrained_embeddings,
    embedding_names,
    read_embeddings,
)

EMBEDDINGS = "model.embed_tokens.weight"
ZERO, STAR, SPACE = 3, 15, 17


def rows_of(changed, policy, tokenizer, *, used=()):
    weights = read_embeddings(policy(changed), by_reference=True)
    return check_untrained_embeddings(weights.input, tokenizer=tokenizer, used_ids=set(used))


def test_the_rows_of_the_quickstarts_model_are_trained(policy, tokenizer):
    weights = read_embeddings(policy(), by_reference=True)
    assert weights.input.shape == (18, 192)
    assert check_untrained_embeddings(weights.input, tokenizer=tokenizer, used_ids=range(18)).status is DiagnosisStatus.OK


def test_zeroed_rows_are_a_warning_and_a_failure_if_the_run_uses_them(policy, tokenizer, changed_model):
    def zero(tensors):
        tensors[EMBEDDINGS][[STAR, SPACE]] = 0.0

    model = changed_model(zero)
    unused = rows_of(model, policy, tokenizer, used=[ZERO])
    assert unused.status is DiagnosisStatus.WARNING
    assert unused.found.startswith("all zero: 2 tokens (15 '*', 17 ' ')")
    assert [entry["id"] for entry in unused.details["all_zero"]] == [STAR, SPACE]
    used = rows_of(model, policy, tokenizer, used=[ZERO, STAR])
    assert used.status is DiagnosisStatus.FAILED
    assert used.found.startswith("this run uses 1 token (15 '*').")
    assert used.remedy


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("one_value", torch.full((192,), 0.02)),
        ("odd_norm", None),
        ("equal_rows", "another"),
    ],
)
def test_other_rows_that_training_cannot_have_made(kind, row, policy, tokenizer, changed_model):
    def spoil(tensors):
        weight = tensors[EMBEDDINGS]
        if row is None:
            weight[STAR] *= 0.01
        else:
            weight[STAR] = weight[ZERO] if row == "another" else row

    found = rows_of(changed_model(spoil), policy, tokenizer, used=[STAR])
    expected = [ZERO, STAR] if kind == "equal_rows" else [STAR]
    assert [entry["id"] for entry in found.details[kind]] == expected
    assert [name for name, ids in found.details.items() if name != "rows_beyond_the_tokenizer" and ids] == [kind]
    # A trained token may have an unusual norm, so this alone is not a failure.
    assert found.status is (DiagnosisStatus.WARNING if kind == "odd_norm" else DiagnosisStatus.FAILED)


def test_rows_of_equal_norm_that_differ_are_not_equal(tokenizer):
    weight = torch.nn.functional.normalize(torch.randn(18, 32, generator=torch.Generator().manual_seed(0)))
    weight[4] = weight[3].flip(0)
    assert check_untrained_embeddings(weight, tokenizer=tokenizer).status is DiagnosisStatus.OK


def test_rows_beyond_the_tokenizers_ids_are_counted_and_no_fault(tokenizer):
    weight = torch.zeros(24, 8)
    weight[:18] = torch.randn(18, 8, generator=torch.Generator().manual_seed(0))
    found = check_untrained_embeddings(weight, tokenizer=tokenizer)
    assert (found.status, found.details["rows_beyond_the_tokenizer"]) == (DiagnosisStatus.OK, 6)


def test_tokens_without_a_row_are_a_failure_only_if_the_run_uses_one(tokenizer):
    for rows, used, status in (
        (24, (), DiagnosisStatus.OK),
        (17, (), DiagnosisStatus.WARNING),
        (17, (STAR, SPACE), DiagnosisStatus.FAILED),
    ):
        found = check_token_rows(torch.zeros(rows, 8), tokenizer=tokenizer, used_ids=used)
        assert (found.status, found.details["missing"]) == (status, [SPACE] if rows == 17 else [])
    assert "this run uses 1 token (17 " in found.found


def test_a_long_list_is_cut_in_the_sentence_and_whole_in_the_details(tokenizer):
    weight = torch.randn(18, 8, generator=torch.Generator().manual_seed(0))
    weight[1:15] = 0.0
    found = check_untrained_embeddings(weight, tokenizer=tokenizer)
    assert "and 2 more" in found.found
    assert len(found.details["all_zero"]) == 14


def test_tying_that_the_config_and_the_weights_agree_on(policy, changed_model):
    tied = read_embeddings(policy(), by_reference=True)
    assert (tied.are_tied, check_tied_embeddings(tied, declared=True).status) == (True, DiagnosisStatus.OK)
    assert check_tied_embeddings(tied, declared=None).status is DiagnosisStatus.OK
    assert check_tied_embeddings(tied, declared=None).found.startswith("tie_word_embeddings is not set in the model's config")

    def untie(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDINGS] + 1.0

    untied = read_embeddings(policy(changed_model(untie, tie_word_embeddings=False)), by_reference=True)
    assert (untied.output_name, untied.are_equal) == ("lm_head.weight", False)
    assert check_tied_embeddings(untied, declared=False).status is DiagnosisStatus.OK
    wrong = check_tied_embeddings(untied, declared=True)
    assert wrong.status is DiagnosisStatus.FAILED
    assert wrong.found == "tie_word_embeddings is true in the model's config, and lm_head.weight is a separate matrix"


def test_a_tied_model_whose_config_says_otherwise(policy):
    wrong = check_tied_embeddings(read_embeddings(policy(), by_reference=True), declared=False)
    assert wrong.status is DiagnosisStatus.FAILED
    assert "is false in the model's config, and the output matrix is the input embedding" in wrong.found


def test_two_equal_matrices_are_a_warning(policy, changed_model):
    def double(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDINGS].clone()

    weights = read_embeddings(policy(changed_model(double, tie_word_embeddings=False)), by_reference=True)
    for declared in (True, False):
        assert check_tied_embeddings(weights, declared=declared).status is DiagnosisStatus.WARNING


def test_a_policy_without_a_known_embedding_says_what_was_looked_for(policy, monkeypatch):
    made = policy()
    monkeypatch.setattr(made, "prepare_refit_info", lambda: {"model.layers.0.weight": ((4, 4), "float32")})
    with pytest.raises(NotSupportedError, match="embed_tokens, wte"):
        read_embeddings(made, by_reference=True)


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ({"token_emb.emb.weight": (18, 8), "pos_emb.emb.weight": (64, 8), "to_logits.weight": (18, 8)}, (0, 2)),
        ({"embedding.weight": (18, 8), "layers.weight": (24, 8), "head.weight": (18, 8)}, (0, 2)),
        ({"tok_embeddings.weight": (18, 8), "layers.weight": (24, 8)}, (0, None)),
        ({"a_emb.weight": (18, 8), "b_emb.weight": (18, 8)}, (None, None)),
        ({"tokens.weight": (18, 8), "head.weight": (18, 8)}, (None, None)),
    ],
)
def test_embeddings_of_models_that_transformers_does_not_have_are_found_by_their_rows(shapes, names):
    manifest = {name: (shape, "float32") for name, shape in shapes.items()}
    expected = tuple(None if index is None else list(shapes)[index] for index in names)
    assert embedding_names(manifest, num_tokens=18) == expected


def test_a_refit_still_works_after_the_embeddings_were_read(policy):
    made = policy()
    first = read_embeddings(made, by_reference=False)  # through shared memory, as from another process
    assert torch.equal(first.input, read_embeddings(made, by_reference=True).input)
    assert made.prepare_weights_for_ipc(2**20)
    made.finish_refit()
