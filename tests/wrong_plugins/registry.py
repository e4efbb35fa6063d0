"""The wrong plugins of this folder, by the name of their module or class: what each does to a run, and what the error says.

A `train` kind stops a plain `rlcore train` within three steps in float32, a `ranks` kind one with two ranks. A `check` kind
cannot show in training, but `rlcore check env` finds it. A `flight` kind shows only in asynchronous runs
(`tests/e2e/test_wrong_engines_in_flight.py`). A `kit` kind needs calls that neither makes: what such an engine
samples could come from a right one. A `kit with ranks` kind shows only in the conformance kit with `--ray`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One plugin.

    Attributes:
        marker: what finds it.
        words: what the error must contain, in addition to the name of the module.
        promise: the test of the conformance kit that finds it.
        changes: changes of the run's config.
        frozen: written after the checks, to see whether they find what they were not written for.
    """

    words: tuple[str, ...] = ()
    promise: str = ""
    marker: Literal["train", "ranks", "check", "flight", "kit", "kit with ranks"] = "train"
    changes: dict[str, Any] = field(default_factory=dict)
    frozen: bool = False


FILTERED = {"policy": {"generation": {"top_p": 0.8}}}
ENGINES = {
    "SwapsTwoRows": Wrong(words=("without its own prompt", "it begins with the prompt of row")),
    "ReturnsNoTruncated": Wrong(words=("returned no column `truncated`",)),
    "DropsARow": Wrong(words=("rows of `weight_version` for a call with",)),
    "ReturnsProbabilities": Wrong(words=("It must be finite and at most 0",)),
    "ReturnsFloat64": Wrong(words=("`logprobs` as a tensor", "float64")),
    "ReturnsCompletionsOnly": Wrong(words=("without its own prompt", "must contain prompt and completion")),
    "ReturnsNan": Wrong(words=("log-probability of nan", "row 0")),
    "TakesAModel": Wrong(words=("cannot be used", "takes (config, model)")),
    "FromScratchWithoutARefit": Wrong(words=("does not define invalidate_kv_cache, prepare_refit_info",)),
    "KeepsItsFirstWeights": Wrong(words=("Step 2", "disagree at weight version 1")),
    "ShiftsLogProbabilities": Wrong(words=("outside of the completion", "It must be 0.0 there"), frozen=True),
    "ReturnsBits": Wrong(words=("nats on average",), frozen=True),
    "SwapsLogProbabilitiesOfTwoRows": Wrong(words=("nats on average",), frozen=True),
    "RoundsLogProbabilities": Wrong(words=("nats on average",), frozen=True),
    "PadsOnTheLeft": Wrong(words=("without its own prompt",), frozen=True),
    "CountsLengthsWithoutThePrompt": Wrong(words=("`unpadded_sequence_lengths`", "row 0"), frozen=True),
    "ReturnsInt32Tokens": Wrong(words=("`output_ids` as a tensor", "int32"), frozen=True),
    "ReturnsALogProbabilityPerRow": Wrong(words=("`logprobs` as a tensor", "It must be [B, T]"), frozen=True),
    "ReturnsLists": Wrong(words=("returned a list as `weight_version`",), frozen=True),
    "ReportsOldVersions": Wrong(
        words=("returned rows with `weight_version` -1, but the engine has the weights of",), frozen=True
    ),
    "LeavesOutTheLogProbabilityOfTheEnd": Wrong(words=("nats",), frozen=True),
    "SamplesTooManyTokens": Wrong(words=("more than its limit (`max_new_tokens`)",), frozen=True),
    "SamplesAtTemperatureOne": Wrong(
        words=("nats on average",), changes={"policy": {"generation": {"temperature": 0.5}}}, frozen=True
    ),
    "OverstatesProbabilities": Wrong(words=("nats on average",), frozen=True),
    "LeavesSampledTokensOutOfSets": Wrong(
        promise="test_top_k_and_top_p_limit_the_tokens", words=("`sampled_sets`", "contains it"), changes=FILTERED
    ),
    "ReturnsSetsOfTheNextRow": Wrong(
        promise="test_top_k_and_top_p_limit_the_tokens", words=("`sampled_sets`",), changes=FILTERED
    ),
    "ReturnsTooWideSets": Wrong(promise="test_top_k_and_top_p_limit_the_tokens", words=("nats on average",), changes=FILTERED),
    "StreamsFromItsFirstWeights": Wrong(
        promise="test_rows_in_progress_continue_after_a_refit", words=("the rows were streamed",), marker="flight"
    ),
    "KeepsKeysAndValues": Wrong(
        promise="test_rows_in_progress_continue_after_a_refit", words=("the rows were streamed",), marker="flight"
    ),
    "LeavesOutTheEndToken": Wrong(promise="test_the_end_token_is_kept", marker="kit", frozen=True),
    "ReportsEndedRowsAsTruncated": Wrong(promise="test_truncated_rows_are_reported", marker="kit", frozen=True),
    "IgnoresSeeds": Wrong(promise="test_seeds_are_independent_of_other_rows", marker="kit"),
    "DecodesGreedily": Wrong(marker="kit"),
    "IgnoresStopTokenIds": Wrong(promise="test_stop_token_ids_end_rows", marker="kit"),
    "ReusesTheStateOfAFinishedRow": Wrong(promise="test_generate_async_equals_generate", marker="kit"),
    "SamplesGreedyRows": Wrong(promise="test_generate_async_equals_generate", marker="kit"),
    "IgnoresTopK": Wrong(promise="test_top_k_and_top_p_limit_the_tokens", marker="kit"),
    "LooksForStopStringsInSingleTokens": Wrong(promise="test_stop_strings_end_their_rows", marker="kit"),
    "ReportsItsVocabularyAsAFraction": Wrong(promise="test_facts_are_those_of_the_model", marker="kit"),
    "RestartsRowsAfterARefit": Wrong(promise="test_rows_in_progress_continue_after_a_refit", marker="kit"),
    "UsesTheOptionsOfTheFirstRow": Wrong(promise="test_options_of_a_row_are_its_own", marker="kit"),
}

POLICIES = {
    "sends_its_first_weights": Wrong(
        promise="test_sent_weights_are_the_trained_weights",
        words=("weights of version 1", "sent the weights of version 1, but they are the same as before"),
    ),
    "counts_of_a_microbatch": Wrong(
        promise="test_microbatches_do_not_change_the_gradient",
        words=("Step 1: ", "passed global_valid_seqs 4 to the loss, but the optimizer step has 32"),
    ),
    "drops_the_last_microbatch": Wrong(words=("Step 1: ", "computed the loss of 28 rows")),
    "repeats_the_first_microbatch": Wrong(
        promise="test_microbatches_do_not_change_the_gradient",
        words=("Step 1: ", "The loss of every row must be computed once"),
    ),
    "reports_a_step_that_it_does_not_take": Wrong(
        promise="test_the_gradient_equals_the_reference", words=("Step 1: ", "must take the optimizer steps that it reports")
    ),
    "returns_no_metrics": Wrong(
        promise="test_loss_and_metrics_equal_the_reference", words=("Step 1: ", "returned no metrics of the loss")
    ),
    "takes_one_step_for_all_rows": Wrong(
        promise="test_a_call_takes_a_step_for_each_batch",
        words=("Step 1: ", "must take one step for each"),
        changes={"policy": {"train_global_batch_size": 16}},
    ),
    "shifts_log_probabilities_in_training": Wrong(
        promise="test_loss_and_metrics_equal_the_reference", words=("Step 1: ", "so the training pass of")
    ),
    "steps_with_a_nan_loss": Wrong(
        promise="test_loss_and_metrics_equal_the_reference", words=("Step 1: ", "it must refuse such a step")
    ),
    "swaps_rows_in_training": Wrong(
        promise="test_loss_and_metrics_equal_the_reference",
        words=("Step 1: ", "at position t of a row, the log-probability of token t of that row"),
    ),
    "trains_at_another_temperature": Wrong(
        promise="test_loss_and_metrics_equal_the_reference",
        words=("Step 1: ", "The step was not taken, so the weights are unchanged"),
    ),
    "scores_microbatches_in_reversed_order": Wrong(
        promise="test_log_probabilities_equal_the_reference",
        words=("Step 1: ", "it must return the scores in the order of the rows"),
        changes={"policy": {"train_global_batch_size": 16, "generation": {"refit_canary": False}}},
    ),
    "takes_two_steps": Wrong(
        promise="test_the_gradient_equals_the_reference", words=("Step 1: ", "disagree at weight version 0"), frozen=True
    ),
    "scores_with_its_first_scores": Wrong(
        promise="test_log_probabilities_equal_the_reference",
        words=("scoring and training pass", "so `get_logprobs` of the policy backend"),
        changes={"policy": {"train_global_batch_size": 16}},
        frozen=True,
    ),
    "skips_every_second_step": Wrong(
        promise="test_a_step_moves_the_weights_as_that_of_the_reference",
        words=("Step 1: ", "must take the optimizer steps that it reports"),
        frozen=True,
    ),
    **{
        f"divides_the_loss_by_{name}": Wrong(
            promise="test_loss_and_metrics_equal_the_reference",
            words=("Step 1: ", f"computes the gradient of the loss times {1 / number:g}, but"),
            frozen=True,
        )
        for name, number in (("two", 2), ("four", 4), ("eight", 8))
    },
    "keeps_the_gradient_of_the_last_microbatch": Wrong(
        promise="test_microbatches_do_not_change_the_gradient", words=("Step 1: ", "Either this gradient is lost"), frozen=True
    ),
    "computes_the_gradient_of_the_last_microbatch": Wrong(
        promise="test_microbatches_do_not_change_the_gradient",
        words=("Step 1: ", "computed the gradient of the loss of 4 rows only"),
        frozen=True,
    ),
    "reports_a_gradient_of_zero": Wrong(
        promise="test_the_gradient_equals_the_reference",
        words=("Step 1: ", "reports gradient norm 0 with learning rate 0.01, but the loss"),
        frozen=True,
    ),
    "steps_with_gradients_of_zero": Wrong(
        promise="test_the_gradient_equals_the_reference",
        words=("Step 1: ", "reports gradient norm 0 with learning rate 0.01, but the loss"),
        changes={"policy": {"optimizer": {"kwargs": {"weight_decay": 0.1}}}},
        frozen=True,
    ),
    "sums_every_metric": Wrong(
        promise="",
        words=("Step 1: ", "as a metric of the loss whose min over", "this may be the sum"),
    ),
    "averages_every_metric": Wrong(
        promise="test_loss_and_metrics_equal_the_reference",
        words=("Step 1: ", "returned 0.125 times the sums that the loss counted, such as 4 instead of 32 rows"),
    ),
    "does_not_exchange_gradients": Wrong(
        marker="ranks", words=("After step 1, the weights of the policy backend Policy", "differ between rank 0 and rank 1")
    ),
    "changes_one_rank_alone": Wrong(
        marker="ranks", words=("After step 1, the weights of `policy` differ between rank 0 and rank 1",)
    ),
    "scores_at_temperature_one": Wrong(marker="kit", promise="test_log_probabilities_equal_the_reference"),
    "ignores_its_vocab_size": Wrong(marker="kit", promise="test_unused_tokens_have_probability_0"),
    "returns_the_top_in_ascending_order": Wrong(marker="kit", promise="test_top_log_probabilities_equal_the_reference"),
    "adds_a_column_to_its_argument": Wrong(marker="kit", promise="test_its_arguments_are_unchanged"),
    "steps_in_evaluations": Wrong(marker="kit", promise="test_evaluation_takes_no_step"),
    "reports_the_clipped_norm": Wrong(marker="kit", promise="test_the_gradient_equals_the_reference"),
    "ignores_max_grad_norm": Wrong(marker="kit", promise="test_a_step_moves_the_weights_as_that_of_the_reference"),
    "counts_calls_as_versions": Wrong(marker="kit", promise="test_the_version_counts_optimizer_steps"),
    "scores_as_its_own_reference": Wrong(marker="kit", promise="test_the_reference_policy_is_frozen"),
    "loses_its_optimizer_state": Wrong(marker="kit", promise="test_training_continues_from_a_checkpoint"),
    "keeps_its_first_fingerprint": Wrong(marker="kit", promise="test_the_fingerprint_is_that_of_the_sent_weights"),
    "ignores_its_schedule": Wrong(marker="kit", promise="test_learning_rates_follow_the_schedule"),
    "reports_no_parameters": Wrong(marker="kit", promise="test_facts_are_those_of_the_model"),
    "attends_across_packed_rows": Wrong(marker="kit", promise="test_packing_changes_nothing"),
    "resumes_from_rounded_weights": Wrong(marker="kit", promise="test_small_steps_add_up_in_bfloat16"),
    "trains_with_dropout": Wrong(marker="kit", promise="test_the_gradient_equals_the_reference"),
    "rounds_its_weights": Wrong(marker="kit", promise="test_small_steps_add_up_in_bfloat16"),
    "scales_small_gradients": Wrong(marker="kit", promise="test_a_small_gradient_is_not_scaled"),
    "averages_gradients_over_ranks": Wrong(marker="kit with ranks", promise="test_a_small_gradient_is_not_scaled"),
    "accepts_a_nan_loss": Wrong(marker="kit", promise="test_a_step_that_is_not_finite_is_refused"),
}

PICTURES = {
    "ShowsThePictureOfAnotherRow": Wrong(words=("canary tokens they differ by",)),
    "ShowsPicturesInReversedOrder": Wrong(words=("Step 1: ", "must return for each sampled token its log-probability")),
    "ShowsThePicturesOfThePreviousCall": Wrong(words=("Step 2: ", "must return for each sampled token its log-probability")),
    "CountsOnePlaceholderLess": Wrong(words=("'generation'", "has other positions for the pictures of a row")),
    "PlacesPicturesOneTokenLater": Wrong(words=("'generation'", "Positions in `images` are those of the row")),
    "KeepsItsFirstTower": Wrong(words=("Step 2: ", "disagree at weight version 1")),
    "SendsItsFirstTower": Wrong(words=("Step 2: ", "disagree at weight version 1")),
    "TrainsOnThePicturesOfAnotherRow": Wrong(words=("Step 1: ", "so the training pass of")),
    "ShiftsPositionsAfterPictures": Wrong(words=("canary tokens they differ by",)),
    "EncodesPicturesTwiceAsBright": Wrong(words=("Step 1: ", "so the training pass of")),
}
"""Engines and policies, in runs whose rows have two pictures."""

ENVIRONMENTS = {
    "ReportsATextAsMetric": Wrong(promise="test_metrics_are_numbers", words=("mood",), frozen=True),
    "ReturnsTooFewRewards": Wrong(promise="test_step_returns_one_valid_entry_per_row", words=("rewards",)),
    "ReturnsANanReward": Wrong(promise="test_step_returns_one_valid_entry_per_row", words=("nan",)),
    "EndsRowsByHalf": Wrong(promise="test_step_returns_one_valid_entry_per_row", words=("0.5", "terminateds")),
    "DropsTheMetadataOfARow": Wrong(promise="test_step_returns_one_valid_entry_per_row", words=("metadata",)),
    "ObservesWithoutARole": Wrong(promise="test_step_returns_one_valid_entry_per_row", words=("observation",)),
    "TakesTwoArguments": Wrong(promise="test_it_is_created_from_its_section", words=("tokenizer",)),
    "ReturnsTheRewardsOfTheNeighbours": Wrong(
        promise="test_rows_are_independent", marker="check", words=("in a batch", "alone")
    ),
    "RewardsTheFirstRow": Wrong(
        promise="test_rows_are_independent", marker="check", words=("in a batch", "alone"), frozen=True
    ),
    "ReturnsObservationsOfAnotherRow": Wrong(
        promise="test_rows_are_independent", marker="check", words=("in a batch", "alone")
    ),
    "ReturnsMetadataOfAnotherRow": Wrong(promise="test_rows_are_independent", marker="check", words=("in a batch", "alone")),
    "EndsAnotherRow": Wrong(promise="test_rows_are_independent", marker="check", words=("in a batch", "alone")),
    "SubtractsTheMeanOfTheCall": Wrong(promise="test_rows_are_independent", marker="check", words=("in a batch", "alone")),
    "RemembersItsCalls": Wrong(
        promise="test_equal_calls_have_equal_results", marker="check", words=("two equal calls had different results",)
    ),
    "AnswersRowsAgainThatHaveEnded": Wrong(
        promise="test_equal_calls_have_equal_results", marker="check", words=("two equal calls had different results",)
    ),
    "ChangesItsArguments": Wrong(
        promise="test_step_does_not_change_its_arguments", marker="check", words=("changed the metadata or the messages",)
    ),
}

TRANSPORTS = {
    "ClosesOnce": Wrong(promise="test_close_may_be_called_twice", frozen=True),
    "SendsFloat16": Wrong(promise="test_every_tensor_arrives_bit_for_bit"),
    "LeavesOutTheLastBucket": Wrong(promise="test_every_tensor_arrives_bit_for_bit"),
    "ReturnsTheNumberOfBuckets": Wrong(promise="test_push_returns_the_bytes_moved"),
    "IgnoresTheBuffer": Wrong(promise="test_the_buffer_limits_the_bytes_in_transit"),
    "IgnoresErrorsOfTheEngine": Wrong(promise="test_a_failed_push_is_an_error_and_the_next_one_is_complete"),
    "LeavesItsFiles": Wrong(promise="test_no_file_is_left"),
    "HasNoDeadline": Wrong(promise="test_a_slow_push_ends_at_its_deadline"),
}

SANDBOXES = {
    "StripsTheOutput": Wrong(promise="test_a_result_has_what_a_program_printed", frozen=True),
    "JoinsBothOutputs": Wrong(promise="test_a_result_has_what_a_program_printed"),
    "StartsANewInterpreterForEachCall": Wrong(promise="test_run_keeps_variables"),
    "ReportsATimeoutAsAnError": Wrong(promise="test_a_timeout_ends_the_call"),
    "CutsOutputSilently": Wrong(promise="test_output_is_limited"),
    "GivesEveryRolloutOneSession": Wrong(promise="test_sessions_share_nothing"),
    "RunsCodeAfterClose": Wrong(promise="test_a_closed_session_is_an_error"),
}

LOGGERS = {
    "CountsItsOwnSteps": Wrong(promise="test_every_step_is_written_once", frozen=True),
    "RemovesMessages": Wrong(promise="test_its_arguments_are_unchanged", frozen=True),
    "WritesThreeDecimals": Wrong(promise="test_every_step_is_written_once", frozen=True),
    "AddsTheStepToTheMetrics": Wrong(promise="test_its_arguments_are_unchanged"),
    "ClosesOnce": Wrong(promise="test_finish_may_be_called_twice"),
    "IgnoresErrorsOfTheDisk": Wrong(promise="test_a_folder_that_cannot_be_written_is_an_error"),
    "LosesTheLastSteps": Wrong(promise="test_every_step_is_written_once"),
    "PrintsEachStep": Wrong(promise="test_it_prints_nothing"),
    "RefusesNan": Wrong(promise="test_it_accepts_every_metric"),
    "StartsItsFileAgain": Wrong(promise="test_a_resumed_run_continues"),
    "WritesEachStepTwice": Wrong(promise="test_every_step_is_written_once"),
    "WritesNamesOfTheFirstStep": Wrong(promise="test_it_is_created_and_logs_steps"),
    "WritesStrictUnicode": Wrong(promise="test_it_accepts_every_text"),
    "WritesToTheWorkingDirectory": Wrong(promise="test_the_working_directory_is_unchanged"),
}

DATASETS = {
    "NamesATaskByNumber": Wrong(promise="test_records_have_the_documented_form", frozen=True),
    "NotesTheTime": Wrong(promise="test_equal_reads_are_equal", frozen=True),
    "ShufflesAfterEachEpoch": Wrong(promise="test_equal_reads_are_equal", frozen=True),
    "AnswersWithNumbers": Wrong(promise="test_records_have_the_documented_form"),
    "CountsItsInstances": Wrong(promise="test_instances_are_equal"),
    "DrawsAtEachRead": Wrong(promise="test_equal_reads_are_equal"),
    "DrawsFromTheGlobalGenerator": Wrong(promise="test_other_seeds_change_nothing"),
    "HasSetsInItsPrompt": Wrong(promise="test_prompts_can_be_hashed"),
    "HashesTexts": Wrong(promise="test_other_processes_read_the_same"),
    "ReturnsFunctions": Wrong(promise="test_records_can_be_pickled"),
    "ReturnsItsOwnRecords": Wrong(promise="test_records_may_be_changed"),
    "StopsAtABadRow": Wrong(promise="test_bad_rows_are_named"),
}

ALGORITHMS = {
    "changes_its_rows": Wrong(promise="test_its_rows_are_unchanged"),
    "depends_on_the_microbatch": Wrong(promise="test_microbatches_do_not_change_the_loss"),
    "draws_from_the_system": Wrong(promise="test_equal_runs_are_equal"),
    "forgets_its_state": Wrong(promise="test_a_resumed_run_is_equal"),
    "only_evaluates": Wrong(promise="test_the_weights_change"),
    "reports_nan": Wrong(promise="test_metrics_are_finite"),
    "takes_fewer_groups": Wrong(promise="test_it_takes_what_it_declares"),
}

LOSSES = {
    "AveragesOverTheMicrobatch": Wrong(promise="test_microbatches_do_not_change_the_gradient", frozen=True),
    "LooksForAnUndeclaredColumn": Wrong(promise="test_it_reads_only_what_it_declares"),
    "ReadsAnUndeclaredColumn": Wrong(promise="test_it_reads_only_what_it_declares"),
}

COMMANDS = {
    "exits_with_one": Wrong(promise="test_a_wrong_argument_is_a_user_error", frozen=True),
    "has_no_example": Wrong(promise="test_its_help_describes_every_argument"),
    "imports_torch": Wrong(promise="test_its_import_is_silent_and_light"),
    "ignores_unknown_options": Wrong(promise="test_an_unknown_option_is_refused"),
    "fails_with_a_traceback": Wrong(promise="test_a_wrong_argument_is_a_user_error"),
    "prints_a_heading_before_json": Wrong(promise="test_json_is_json"),
}
