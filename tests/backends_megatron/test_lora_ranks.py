"""Adapters of parallel layouts equal those of the backend `hf`: log-probabilities, gradients, steps, refits, checkpoints."""

from pathlib import Path

import megatron_cases as cases
import megatron_layouts as layouts
import megatron_lora_ranks
import pytest
import torch
from rank_processes import RankProgram
from safetensors.torch import load_file
from test_parity import in_order, read

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(1200)]

NAMES = [
    "one", "tp2", "tp2-sp", "tp2-budget", "pp2", "interleaved-packed", "dp2-overlap", "cp2", "ep2", "tp2-pp2-packed",
    "tp2-dp2-distributed", "tp2-ep2",
]  # fmt: skip
VALUE_NAMES = ["value-tp2-sp", "value-pp2"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """By kind, results of the backend `hf`: scores, gradients and weights after some steps; the adapter is next to it."""
    root, made = tmp_path_factory.mktemp("adapted"), {}
    for kind in sorted({layouts.LAYOUTS[name].kind for name in NAMES}):
        cases.make_model(kind, root / kind)
        made[kind] = _trained_by_hf(root / kind, root / f"{kind}-adapter")
    cases.make_value_model("llama-tied", root / "llama-tied-value")
    return root, made


def _trained_by_hf(folder: Path, adapter: Path) -> dict:
    def start(**fields):
        lora = {"rank": 4, "alpha": 8}
        config = HFPolicyConfig(
            model_name=str(folder), hf_cfg={"lora": lora}, generation={"backend": "hf", "lora": "adapter"}, **fields
        )
        worker = HFPolicyWorker(cases.make_context(), config)
        worker.setup()
        return worker

    worker, rows = start(optimizer=cases.SGD, max_grad_norm=None), cases.make_rows()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in worker.model.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    worker.save_checkpoint(adapter, None)
    found = {key: worker.get_logprobs(rows, reference=key == "reference")["logprobs"] for key in ("logprobs", "reference")}
    found["before"] = {name: tensor.clone() for name, tensor in worker.iter_weights()}
    found["step"] = worker.train(rows, cases.NLL(), counts=cases.counts_of(rows))[0]
    found["after"] = {name: tensor.clone() for name, tensor in worker.iter_weights()}
    worker = start(**layouts.TRAINING)
    worker.load_checkpoint(adapter, None)
    found["steps"] = []
    for number in range(layouts.STEPS):
        rows = cases.make_rows(seed=100 + number)
        found["steps"].append(worker.train(rows, cases.NLL(), counts=cases.counts_of(rows))[0])
    worker.save_checkpoint(adapter.with_name(adapter.name + "-trained"), None)
    return {**found, "trained": load_file(adapter.with_name(adapter.name + "-trained") / "adapter_model.safetensors")}


@pytest.fixture(scope="module")
def out(plain, tmp_path_factory):
    """The results of all layouts."""
    folder = tmp_path_factory.mktemp("ranks")
    by_world = {world: [f"run:{name}" for name in NAMES if layouts.LAYOUTS[name].world == world] for world in (4, 2, 1)}
    by_world[2] += [f"values:{name}" for name in VALUE_NAMES]
    for name in megatron_lora_ranks.RESUMED:
        by_world[layouts.LAYOUTS[name].world].append(f"resume:{name}")
    launches = [f"{world}={','.join(jobs)}" for world, jobs in by_world.items()]
    RankProgram(Path(__file__).with_name("megatron_lora_ranks.py"), plain[0], folder, *launches).wait()
    return folder


def adapters_in(weights):
    return {name: tensor for name, tensor in weights.items() if ".lora_" in name}


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_with_and_without_adapters_are_those_of_the_backend_hf(out, plain, name):
    layout, found = read(out, name)
    for key in ("logprobs", "reference"):
        # Two orders of summation in float32; log-probabilities reach -14 with these adapters.
        assert float((in_order(layout, found, key) - plain[1][layout.kind][key]).abs().max()) < 1e-5
    assert float((in_order(layout, found, "logprobs") - in_order(layout, found, "reference")).abs().max()) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_adapters_are_those_of_the_backend_hf_and_the_base_stays_frozen(out, plain, name):
    layout, found = read(out, name)
    expected = plain[1][layout.kind]
    gradient = {key: expected["before"][key] - expected["after"][key] for key in adapters_in(expected["before"])}
    for rank in found:
        assert rank["before"].keys() == expected["before"].keys() == rank["manifest"].keys()
        for key, tensor in rank["before"].items():
            assert torch.equal(tensor, expected["before"][key]), key
            assert rank["manifest"][key][0] == tuple(tensor.shape)
            moved = gradient.get(key)
            if moved is None or not bool(moved.any()):
                assert torch.equal(rank["after"][key], tensor), key
        steps = {key: rank["before"][key] - rank["after"][key] for key in gradient}
        assert cases.largest_relative_error(steps, gradient) < 2e-5
        assert rank["step"].grad_norm == pytest.approx(expected["step"].grad_norm, rel=2e-6)
        trained = sum(tensor.numel() for key, tensor in adapters_in(rank["before"]).items() if "scale" not in key)
        assert rank["facts"]["num_trained_parameters"] == trained


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_steps_and_saved_adapters_equal_those_of_the_backend_hf(out, plain, name):
    layout, found = read(out, name)
    expected = plain[1][layout.kind]
    saved = load_file(out / name / "w" / "adapter_model.safetensors")
    # Adam divides by the gradient's own size, so rounding in small gradients comes through whole.
    assert cases.largest_relative_error(saved, expected["trained"]) < 5e-5
    for rank in found:
        assert [step.lr for step in rank["steps"]] == pytest.approx([step.lr for step in expected["steps"]])
        assert [step.grad_norm for step in rank["steps"]] == pytest.approx(
            [step.grad_norm for step in expected["steps"]], rel=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
def test_merged_refits_are_the_sums_of_base_and_saved_adapters(out, plain, name):
    _, found = read(out, name)
    base = plain[1][layouts.LAYOUTS[name].kind]["before"]
    saved = load_file(out / name / "w" / "adapter_model.safetensors")
    for rank in found:
        assert rank["merged"].keys() == {key for key in base if ".lora_" not in key}
        for key, tensor in rank["merged"].items():
            layer = "base_model.model." + key.removesuffix(".weight")
            expected = base[key]
            if f"{layer}.lora_A.weight" in saved:
                # alpha / rank = 2. A rank multiplies its own rows, so the order of the sum over the rank may differ.
                expected = expected + 2 * (saved[f"{layer}.lora_B.weight"] @ saved[f"{layer}.lora_A.weight"])
            assert torch.allclose(tensor, expected, rtol=1e-6, atol=1e-7), key


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", megatron_lora_ranks.RESUMED)
def test_a_run_resumed_with_other_ranks_takes_the_step_of_an_uninterrupted_one(out, name, precision):
    folder = out / f"saved-{precision}"
    expected = torch.load(folder / "uninterrupted-0.pt", weights_only=False)
    saved = load_file(folder / "w" / "adapter_model.safetensors")
    for rank in range(layouts.LAYOUTS[name].world):
        found = torch.load(folder / f"{name}-{rank}.pt", weights_only=False)
        assert found["initial"].keys() == expected["initial"].keys()
        for key, tensor in found["initial"].items():
            assert torch.equal(tensor, expected["initial"][key]), "new adapters do not depend on the ranks"
        for key, tensor in adapters_in(found["weights"]).items():
            if name == megatron_lora_ranks.SAVED:
                assert torch.equal(tensor, expected["weights"][key]), key
            if not key.endswith("scale"):
                assert not torch.equal(tensor, saved[f"base_model.model.{key}"]), "the third step moved it"
            # Adam moves a value by the learning rate whatever the size of its gradient, so one whose gradient is only the
            # rounding of another order of summation may go the other way.
            assert float((tensor - expected["weights"][key]).abs().max()) <= 2 * expected["result"].lr
        if precision == "float32":
            assert cases.largest_relative_error(found["weights"], expected["weights"]) < 1e-3
        assert found["result"].lr == expected["result"].lr


@pytest.mark.parametrize("name", VALUE_NAMES)
def test_a_scalar_head_is_trained_with_the_adapters_as_by_the_backend_hf(out, plain, name):
    layout, found = read(out, name)
    config = HFPolicyConfig(
        model_name=str(plain[0] / layout.kind),
        head="scalar",
        hf_cfg={"lora": {"rank": 4, "alpha": 8}},
        **layouts.TRAINING,
    )
    worker, rows = HFPolicyWorker(cases.make_context(), config), cases.make_rows()
    worker.setup()
    worker.load_checkpoint(out / name / "initial", None)
    for _ in range(layouts.STEPS):
        worker.train(rows, cases.SquaredError(), counts=cases.counts_of(rows))
    assert float((in_order(layout, found, "values") - worker.get_values(rows)["values"]).abs().max()) < 1e-4
    worker.save_checkpoint(out / name / "hf", None)
    saved, expected = (load_file(out / name / which / "adapter_model.safetensors") for which in ("w", "hf"))
    assert "base_model.model.score.weight" in saved
    # B and its gradients start small, and Adam's steps do not depend on their size, so rounding comes through.
    assert cases.largest_relative_error(saved, expected) < 1e-3
