"""Packed rows and shared prefixes by torch's variable-length operator, whose kernel for GPUs is emulated here on the CPU.

The operator itself is torch's: its arguments, its log-sum-exp [heads, tokens], and its registered backward pass are those that
run on a GPU.
"""

import dataclasses

import pytest
import torch
import transformers
from simulated_gpu import SimulatedGpu

from rl_backends_hf.cpu_attention import share_prefixes
from rl_backends_hf.scoring.model_inputs import packed_input, shared_input
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_backends_hf.training.prefix_support import why_not_plain
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_backends_hf.varlen_attention import VARLEN, Borders, SharedRows, attend_packed, varlen_attention
from rl_core.errors import NotSupportedError

CPU = torch.device("cpu")


def sequences(borders_q, borders_k):
    pairs = zip(borders_q.tolist(), borders_q.tolist()[1:], borders_k.tolist(), borders_k.tolist()[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs if b > a]


def probabilities(q, k, causal, scale):
    """Scores [heads, queries, keys] of one sequence, with keys repeated for grouped queries; not normalized."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if causal:
        allowed = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


def flash_forward(query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal, return_debug_mask, *, scale=None, **kwargs):
    """`aten::_flash_attention_forward` for sequences of variable length."""
    output, lse = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
    for own, others in sequences(cum_q, cum_k):
        assert others.stop > others.start, "the kernel's log-sum-exp of no keys is infinite"
        assert own.stop - own.start <= max_q
        assert others.stop - others.start <= max_k
        scores = probabilities(query[own], key[others], causal, scale)
        repeated = value[others].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        output[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), repeated)
        lse[:, own] = scores.logsumexp(-1).float()
    return output, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(()), torch.zeros(())


def flash_backward(
    grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, state, unused, *, scale=None, **kwargs
):
    """`aten::_flash_attention_backward`: what it computes from any output and log-sum-exp, not only its own."""
    gradients = [torch.zeros_like(each) for each in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    factor = scale or query.shape[-1] ** -0.5
    for own, others in sequences(cum_q, cum_k):
        share = (probabilities(query[own], key[others], causal, scale) - lse[:, own].unsqueeze(-1)).exp()
        k, v = (each[others].repeat_interleave(groups, dim=1) for each in (key, value))
        change = torch.einsum("qhd,khd->hqk", grad[own], v) - (grad[own] * out[own]).sum(-1).t().unsqueeze(-1)
        scores = share * change * factor
        gradients[0][own] += torch.einsum("hqk,khd->qhd", scores, k)
        for total, terms in (
            (gradients[1], ("hqk,qhd->khd", scores, query[own])),
            (gradients[2], ("hqk,qhd->khd", share, grad[own])),
        ):
            total[others] += torch.einsum(*terms).unflatten(1, (-1, groups)).sum(2)
    return tuple(gradients)


@pytest.fixture
def emulated():
    """The kernels of GPUs, computed on the CPU in the dtype of their inputs."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    yield
    library._destroy()


def tensors(tokens, *, heads=4, key_heads=2, width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    shapes = [(tokens, count, width) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def plain_attention(q, k, v, visible):
    """The reference in float64: dense attention of [N, heads, D] with the mask `visible` [N, N]."""
    q, k, v = (each.transpose(0, 1).double() for each in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(0, 1)


def gradients_of(function, q, k, v, weights):
    leaves = [each.detach().clone().requires_grad_() for each in (q, k, v)]
    output = function(*leaves)
    (output * weights).sum().backward()
    return output.detach(), [each.grad for each in leaves]


def assert_same_as_reference(function, tokens, visible):
    # The log-sum-exp is float32 also for float64 inputs, so results agree to its precision.
    q, k, v, weights = tensors(tokens)
    output, gradients = gradients_of(function, q, k, v, weights)
    expected, wanted = gradients_of(lambda *leaves: plain_attention(*leaves, visible), q, k, v, weights)
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)
    for found, reference in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, reference, rtol=0, atol=5e-6)


def test_packed_rows_have_the_outputs_and_gradients_of_dense_attention_with_a_mask(emulated):
    lengths = [3, 1, 6]
    row = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    visible = (row[:, None] == row) & torch.ones(10, 10, dtype=torch.bool).tril()
    borders = Borders.of(lengths, lengths, CPU)
    assert_same_as_reference(lambda q, k, v: attend_packed(q, k, v, borders, None), 10, visible)


def batch_of_prompts():
    """Two prompts with three and two rows, one row without company, and two rows that share nothing."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (8, 9), generator=generator)
    ids[1:3, :4], ids[4, :6] = ids[0, :4], ids[3, :6]
    ids[6, 0], ids[7, 0] = 3, 4
    lengths = torch.tensor([9, 4, 7, 9, 8, 5, 6, 7])
    return ids, lengths, torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])


def visible_tokens(shared, ids, lengths):
    """[N, N]: which tokens of the sequence each one attends to, from the rows alone."""
    visible = torch.zeros(shared.input_ids.shape[1], shared.input_ids.shape[1], dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        index = shared.token_index[row, :length]
        for position in range(length):
            visible[index[position], index[: position + 1]] = True
    return visible


def test_rows_with_a_shared_prefix_have_the_outputs_and_gradients_of_dense_attention_with_a_mask(emulated):
    ids, lengths, prompts = batch_of_prompts()
    shared = share_prefixes(ids, lengths, prompts)
    layout = SharedRows.of(shared, CPU)

    def function(q, k, v):
        inputs = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        module = torch.nn.Module()
        module.is_causal = True
        return varlen_attention(module, *inputs, None, shared_prefix=layout)[0][0]

    assert_same_as_reference(function, shared.input_ids.shape[1], visible_tokens(shared, ids, lengths))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_model_scores_packed_and_shared_rows_as_it_scores_rows_alone(parts, model_folder, emulated, kind):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder(kind)).eval()
    model.set_attn_implementation(VARLEN)
    scoring = TokenScoring(model, chunk_tokens=7)
    rows = parts.make_prompt_rows()
    expected = parts.plain_logprobs(transformers.AutoModelForCausalLM.from_pretrained(model_folder(kind)), rows)
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    packed = packed_input(ids, lengths, device=CPU, shift=1, variable_length_kernel=VARLEN)
    shared = shared_input(ids, lengths, rows["prompt_id"], device=CPU, shift=1)
    layout = SharedRows.of(shared.attention["shared_prefix"], CPU)
    # Ten last bits of log-probabilities of 5 nats in float32: the kernel adds in another order.
    with torch.no_grad():
        torch.testing.assert_close(scoring.score(packed), expected, rtol=0, atol=5e-6)
        shared.attention["shared_prefix"] = layout
        torch.testing.assert_close(scoring.score(shared), expected, rtol=0, atol=5e-6)


def test_the_work_per_layer_does_not_grow_with_the_number_of_prompts(emulated, monkeypatch):
    calls = []
    forward = torch.ops.torch_attn._varlen_attn
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", lambda *args: calls.append(1) or forward(*args))
    for copies in (1, 3):
        ids, lengths, prompts = batch_of_prompts()
        prompts = torch.cat([prompts + 4 * copy for copy in range(copies)])
        shared = share_prefixes(ids.repeat(copies, 1), lengths.repeat(copies), prompts)
        q, k, v, _ = (each.transpose(0, 1).unsqueeze(0) for each in tensors(shared.input_ids.shape[1]))
        calls.clear()
        varlen_attention(torch.nn.Module(), q, k, v, None, shared_prefix=SharedRows.of(shared, CPU))
        assert len(calls) == 3


def test_attention_with_a_window_is_refused_so_that_the_policy_falls_back_to_a_mask(parts, model_folder, emulated):
    q, k, v, _ = (each.transpose(0, 1).unsqueeze(0) for each in tensors(4))
    with pytest.raises(NotSupportedError, match="sliding_window"):
        varlen_attention(torch.nn.Module(), q, k, v, None, packed_rows=Borders.of([4], [4], CPU), sliding_window=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("gemma2")).eval()
    model.set_attn_implementation(VARLEN)
    why = why_not_plain(TokenScoring(model, chunk_tokens=7), device=CPU, computed_in=torch.float32)
    assert "sliding_attention" in why


@pytest.fixture
def checked(monkeypatch):
    """A simulated GPU with emulated kernels that check what the kernels of a GPU require of their inputs; their calls."""
    calls = []
    with SimulatedGpu().active() as gpu:

        def check(*tensors, borders, floats=()):
            assert all(map(gpu.holds, (*tensors, *borders, *floats)))
            assert {each.dtype for each in tensors} == {torch.bfloat16}
            assert all(each.stride(-1) == 1 for each in tensors)
            assert {(each.dtype, each.is_contiguous()) for each in borders} == {(torch.int32, True)}
            assert all(each.dtype == torch.float32 and each.is_contiguous() for each in floats)

        def forward(query, key, value, cum_q, cum_k, *args, **kwargs):
            check(query, key, value, borders=(cum_q, cum_k))
            calls.append("forward")
            output, lse, *rest = flash_forward(query.float(), key.float(), value.float(), cum_q, cum_k, *args, **kwargs)
            return output.to(query.dtype), lse, *rest

        def backward(grad, query, key, value, out, lse, cum_q, cum_k, *args, **kwargs):
            check(grad, query, key, value, out, borders=(cum_q, cum_k), floats=(lse,))
            calls.append("backward")
            floats = (each.float() for each in (grad, query, key, value, out))
            return tuple(each.to(query.dtype) for each in flash_backward(*floats, lse, cum_q, cum_k, *args, **kwargs))

        library = torch.library.Library("aten", "IMPL")
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield calls
        library._destroy()


LORA = {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.mark.parametrize("packing", [False, True], ids=["shared-prefix", "packed"])
@pytest.mark.parametrize(
    "lora",
    [None, pytest.param(LORA, marks=pytest.mark.slow), pytest.param({**LORA, "autocast": True}, marks=pytest.mark.slow)],
    ids=["all", "lora", "autocast"],
)
def test_kernels_get_bfloat16_on_the_gpu_from_a_policy_and_score_as_dense(checked, parts, model_folder, lora, packing):
    rows = parts.make_rows() if packing else parts.make_prompt_rows()
    columns, norms = {}, {}
    for device in ("cpu", "cuda"):
        config = parts.make_config(
            model_folder("qwen3"),
            hf={"lora": lora, "cpu_products": "bfloat16" if device == "cpu" else "auto"},
            precision="bfloat16",
            sequence_packing={"enabled": packing},
            optimizer=parts.SGD,
        )
        worker = HFPolicyWorker(dataclasses.replace(parts.make_context(), device=device), config)
        worker.setup()
        checked.clear()
        columns[device] = worker.get_logprobs(rows)["logprobs"].cpu()
        assert set(checked) == (set() if device == "cpu" else {"forward"})
        norms[device] = worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))[0].grad_norm
        assert set(checked) == (set() if device == "cpu" else {"forward", "backward"})
    # bfloat16 rounds to 8 bits, in dense attention at other points than in the kernels.
    torch.testing.assert_close(columns["cuda"], columns["cpu"], rtol=0, atol=0.06)
    assert norms["cuda"] == pytest.approx(norms["cpu"], rel=0.005)
