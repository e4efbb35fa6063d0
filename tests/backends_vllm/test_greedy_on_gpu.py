"""Log-probabilities of greedy rows with vLLM's GPU model runner; its interface needs no GPU."""

from __future__ import annotations

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import _load_logitsprocs_by_fqcns
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_by_fqcns

from rl_backends_vllm.device import greedy_processor
from rl_backends_vllm.requests import GREEDY_TEMPERATURE

SLOTS, VOCABULARY = 4, 6


def processor():
    [found] = _load_v2_logitsprocs_by_fqcns([greedy_processor("cuda")])
    nothing = dict.fromkeys(("all_token_ids", "prompt_len", "prefill_len", "total_len"))
    return found(None, LogitsProcRequestState(device=torch.device("cpu"), max_num_reqs=SLOTS, vocab_size=VOCABULARY, **nothing))


def greedy(temperature):
    return SamplingParams(temperature=0.0, extra_args={GREEDY_TEMPERATURE: temperature})


def applied(made, logits, slots):
    slots = torch.tensor(slots)
    nothing = dict.fromkeys(("expanded_local_pos", "input_ids", "pos", "seq_lens_upper_bound_np"))
    context = LogitsContext(expanded_idx_mapping=slots, idx_mapping=slots, idx_mapping_np=np.asarray(slots), **nothing)
    return made.apply(logits.clone(), context)


def test_each_model_runner_is_given_the_processor_that_it_takes():
    [on_cpu] = _load_logitsprocs_by_fqcns([greedy_processor("cpu")])
    [on_gpu] = _load_v2_logitsprocs_by_fqcns([greedy_processor("cuda")])
    assert on_cpu is not on_gpu


def test_logits_of_greedy_rows_are_divided_by_their_temperature_in_any_slot():
    made = processor()
    assert made.add_request(2, greedy(0.5)) is True
    assert made.add_request(0, SamplingParams(temperature=0.7)) is False
    assert made.add_request(1, greedy(2.0)) is True
    logits = torch.randn(3, VOCABULARY)
    found = applied(made, logits, [1, 2, 0])
    assert torch.equal(found, torch.stack([logits[0] / 2.0, logits[1] / 0.5, logits[2]]))


def test_a_reused_slot_keeps_no_state_of_the_previous_row():
    made = processor()
    made.add_request(3, greedy(0.5))
    made.add_request(3, SamplingParams(temperature=1.0))
    logits = torch.randn(1, VOCABULARY)
    assert torch.equal(applied(made, logits, [3]), logits)
