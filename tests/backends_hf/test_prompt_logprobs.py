"""Log-probabilities of a prompt's tokens (option `prompt_logprobs` of a row), compared with Transformers' own forward pass."""

import asyncio

import pytest
import torch
import transformers
from readable_model import batch_of

from rl_backends_hf.generation import HuggingFaceGeneration
from rl_backends_hf.sampling import prefill
from rl_backends_hf.sampling.prefill import PromptScorer
from rl_core.errors import BrokenPromiseError, NotSupportedError, WorkerError
from rl_core.testing.outputs.models import checked_generation

PROMPTS = [[5, 9, 31, 7, 7, 120], [8], [5, 9, 31, 7, 7, 120], [44, 3, 99]]


def scores_of(folder, prompt, k, dtype=torch.float32):
    """For each token but the first, its id and log-probability, and then those of the `k` most likely tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    top = logprobs.topk(k)
    return [
        [(token, logprobs[at, token].item()), *zip(top.indices[at].tolist(), top.values[at].tolist(), strict=True)]
        for at, token in enumerate(prompt[1:])
    ]


def check(found, folder, prompt, k, *, atol=1e-4, **options):
    """`atol`: two orders of float32 sums over values of about 10."""
    assert found[0] == []
    for own, expected in zip(found[1:], scores_of(folder, prompt, k, **options), strict=True):
        assert own[0][0] == expected[0][0]
        if atol < 1e-2:
            assert [token for token, _ in own] == [token for token, _ in expected]
        assert [logprob for _, logprob in own] == pytest.approx([logprob for _, logprob in expected], abs=atol)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "gemma2", "gpt2", "granite", "cohere"])
def test_scores_of_prompts_equal_those_of_transformers_at_temperature_1(model_folder, kind):
    folder = model_folder(kind)
    engine = HuggingFaceGeneration(folder, max_new_tokens=4, temperature=0.6, top_p=0.8, repetition_penalty=1.3)
    options = [{"prompt_logprobs": 3, "temperature": 2.0}, {"prompt_logprobs": 0}, {"prompt_logprobs": 1}, None]
    rows = batch_of(*PROMPTS, sampling=options, sample_seeds=torch.arange(4))
    output = engine.generate(rows)
    check(output["prompt_logprobs"][0], folder, PROMPTS[0], 3)
    assert output["prompt_logprobs"][1] == [[]]  # a prompt of one token
    check(output["prompt_logprobs"][2], folder, PROMPTS[2], 1)
    assert output["prompt_logprobs"][3] is None
    assert "prompt_logprobs" not in engine.generate(batch_of(*PROMPTS))
    plain = engine.generate(batch_of(*PROMPTS, sampling=[{"temperature": 2.0}, None, None, None], sample_seeds=torch.arange(4)))
    assert torch.equal(plain["output_ids"], output["output_ids"])  # sampling does not change
    engine.shutdown()


def test_in_bfloat16_scores_differ_from_transformers_by_rounding_only(model_folder):
    engine = HuggingFaceGeneration(model_folder("llama"), max_new_tokens=2, torch_dtype="bfloat16")
    output = engine.generate(batch_of(PROMPTS[0], sampling=[{"prompt_logprobs": 2}]))
    # 8 bits of precision: logits of about 10 have errors of some hundredths.
    check(output["prompt_logprobs"][0], model_folder("llama"), PROMPTS[0], 2, atol=0.15, dtype=torch.bfloat16)
    engine.shutdown()


def test_a_long_prompt_is_scored_with_few_logits_at_one_time(model_folder, monkeypatch):
    folder, rows = model_folder("llama"), []
    engine = HuggingFaceGeneration(folder, max_new_tokens=1)
    engine.wait_ready()
    prompt = torch.randint(3, 160, (250,), generator=torch.Generator().manual_seed(0)).tolist()
    monkeypatch.setattr(prefill, "_SCORED_LOGITS", 16 * 160 + 5)
    head = engine.group.worker.model.lm_head
    handle = head.register_forward_hook(lambda _, inputs, output: rows.append(output.numel() // 160))
    output = engine.generate(batch_of(prompt, sampling=[{"prompt_logprobs": 2}]))
    handle.remove()
    assert max(rows) == 16
    assert sum(rows) == 250  # each position once, and the last one for the next token
    check(output["prompt_logprobs"][0], folder, prompt, 2)
    engine.shutdown()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda scores: None, "returned no `prompt_logprobs` for the 6 tokens of the prompt of row 1"),
        (lambda scores: scores[1:], "returned no `prompt_logprobs` for the 6 tokens"),
        (lambda scores: [scored[1:] for scored in scores], "returned no `prompt_logprobs` for the 6 tokens"),
        (lambda scores: [[(token, -logprob) for token, logprob in scored] for scored in scores], "which is not a log-prob"),
        (lambda scores: [[(token, float("nan")) for token, _ in scored] for scored in scores], "which is not a log-prob"),
    ],
)
def test_an_engine_that_returns_wrong_scores_is_named_with_the_row(model_folder, change, problem):
    engine = HuggingFaceGeneration(model_folder("llama"), max_new_tokens=1)
    rows = batch_of([8, 3], PROMPTS[0], sampling=[None, {"prompt_logprobs": 1}])
    output = checked_generation(engine.generate(rows), data=rows, generation=engine)
    output["prompt_logprobs"] = [None, change(output["prompt_logprobs"][1])]
    with pytest.raises(BrokenPromiseError, match=f"HuggingFaceGeneration.*{problem}"):
        checked_generation(output, data=rows, generation=engine)
    engine.shutdown()


def test_the_next_turn_of_a_session_has_the_scores_of_its_whole_prompt(model_folder):
    folder = model_folder("llama")
    engine = HuggingFaceGeneration(folder, max_new_tokens=3)

    async def turn(prompt, **columns):
        [output] = [output async for _, output in engine.generate_async(batch_of(prompt, session_ids=["a"], **columns))]
        return output

    async def turns():
        first = await turn(PROMPTS[0])
        prompt = [*first["output_ids"][0].tolist(), 17, 4]
        return prompt, await turn(prompt, sampling=[{"prompt_logprobs": 1}])

    prompt, output = asyncio.run(turns())
    check(output["prompt_logprobs"][0], folder, prompt, 1)
    engine.shutdown()


def test_a_model_whose_logits_are_not_its_head_on_its_backbone_refuses_the_option_by_name(model_folder, monkeypatch):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    assert PromptScorer.of(model) is not None
    forward = model.forward

    def scaled(*arguments, **keywords):  # as a family with a factor that `logit_transform` lacks
        output = forward(*arguments, **keywords)
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            logits=output.logits * 1.5, past_key_values=output.past_key_values
        )

    monkeypatch.setattr(model, "forward", scaled)
    assert PromptScorer.of(model) is None
    monkeypatch.setattr(PromptScorer, "of", lambda model: None)
    engine = HuggingFaceGeneration(model_folder("llama"), max_new_tokens=1)
    with pytest.raises((NotSupportedError, WorkerError), match="does not support prompt_logprobs in the column `sampling`"):
        engine.generate(batch_of(PROMPTS[0], sampling=[{"prompt_logprobs": 1}]))
    engine.shutdown()
