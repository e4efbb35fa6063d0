"""Float32 master weights start from the values of the file under every parallel layout, so small steps have an effect."""

from collections import defaultdict

import megatron_cases as cases
import megatron_layouts as layouts
import pytest
import torch
from safetensors.torch import load_file

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPPED = [name for name in layouts.MASTERS if not name.startswith("value")]
LAYERS = 4
"""Of every model here; each has four query heads and two key heads."""


def read(out, name):
    """The layout and the results of its ranks."""
    layout = layouts.LAYOUTS[name]
    return layout, [torch.load(out / f"masters-{name}-{rank}.pt", weights_only=False) for rank in range(layout.world)]


def rows_of_vocabulary(matrix, rank, ranks):
    padded = torch.cat([matrix, matrix.new_zeros(-len(matrix) % ranks, matrix.shape[1])])
    return padded.chunk(ranks)[rank]


def layer_by_hand(file, layer, rank, ranks, experts):
    """The shard of one layer on a tensor-parallel rank, by Megatron's name in the layer."""
    of_layer = {name.split(f"layers.{layer}.")[1]: values for name, values in file.items() if f"layers.{layer}." in name}
    query, key, value = (of_layer.pop(f"self_attn.{part}_proj.weight").chunk(2) for part in "qkv")
    groups = [torch.cat(each) for each in zip(query, key, value, strict=True)]
    held = {
        "self_attention.linear_qkv.weight": torch.cat(groups[rank * 2 // ranks : (rank + 1) * 2 // ranks]),
        "self_attention.linear_proj.weight": of_layer["self_attn.o_proj.weight"].chunk(ranks, 1)[rank],
        "input_layernorm.weight": of_layer["input_layernorm.weight"],
        "pre_mlp_layernorm.weight": of_layer["post_attention_layernorm.weight"],
    }
    for part in "qk":
        if f"self_attn.{part}_norm.weight" in of_layer:
            held[f"self_attention.{part}_layernorm.weight"] = of_layer[f"self_attn.{part}_norm.weight"]
    if "mlp.gate.weight" in of_layer:
        held["mlp.router.weight"] = of_layer["mlp.gate.weight"]
        for number, expert in enumerate(experts):
            gate, up, down = (of_layer[f"mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            held[f"mlp.experts.local_experts.{number}.linear_fc1.weight"] = torch.cat([gate, up])
            held[f"mlp.experts.local_experts.{number}.linear_fc2.weight"] = down
    else:
        gate, up = (of_layer[f"mlp.{part}_proj.weight"].chunk(ranks)[rank] for part in ("gate", "up"))
        held["mlp.linear_fc1.weight"] = torch.cat([gate, up])
        held["mlp.linear_fc2.weight"] = of_layer["mlp.down_proj.weight"].chunk(ranks, 1)[rank]
    return held


def by_hand(file, layout, rank):
    """The values of the file in the shard of a rank, by chunk and Megatron's name."""
    at, axes = layouts.grid_of(layout).get_worker_coords(rank), layouts.grid_of(layout)
    stages, ranks = axes.get_axis_size("pipeline"), axes.get_axis_size("tensor")
    chunks = layout.megatron.get("virtual_pipeline_model_parallel_size", 1)
    divided = layout.megatron.get("expert_model_parallel_size", 1)
    experts = range(4)[rank % divided * 4 // divided :][: 4 // divided]
    each = LAYERS // (stages * chunks)
    held = {}
    for chunk in range(chunks):
        place = chunk * stages + at["pipeline"]
        if place == 0:
            embedding = file["model.embed_tokens.weight"]
            held[chunk, "embedding.word_embeddings.weight"] = rows_of_vocabulary(embedding, at["tensor"], ranks)
        for number in range(each):
            for name, values in layer_by_hand(file, place * each + number, at["tensor"], ranks, experts).items():
                held[chunk, f"decoder.layers.{number}.{name}"] = values
        if place == stages * chunks - 1:
            held[chunk, "decoder.final_layernorm.weight"] = file["model.norm.weight"]
            if "score.weight" in file:
                held[chunk, "output_layer.weight"] = file["score.weight"]
            elif "lm_head.weight" in file:
                held[chunk, "output_layer.weight"] = rows_of_vocabulary(file["lm_head.weight"], at["tensor"], ranks)
            elif stages > 1:
                embedding = file["model.embed_tokens.weight"]
                held[chunk, "output_layer.weight"] = rows_of_vocabulary(embedding, at["tensor"], ranks)
    return held


@pytest.mark.parametrize("when", ["begin", "again"])
@pytest.mark.parametrize("name", layouts.tiered("masters", layouts.MASTERS))
def test_every_rank_updates_its_shard_of_the_float32_values_of_the_file(models, out, name, when):
    """At the start, and when weights came from a folder after steps on others."""
    layout, found = read(out, name)
    file = load_file(models / layout.kind / "model.safetensors")
    shares, wholes = defaultdict(list), {}
    for rank, each in enumerate(found):
        held = by_hand(file, layout, rank)
        assert each[when].keys() == held.keys()
        at = layouts.grid_of(layout).get_worker_coords(rank)
        for where, values in held.items():
            if not layout.megatron.get("use_distributed_optimizer"):
                assert torch.equal(each[when][where], values.flatten()), where
                continue
            # Ranks with equal coordinates have equal shards; with two expert-parallel ranks, every second rank has an expert.
            place = rank % layout.megatron.get("expert_model_parallel_size", 1) if "experts" in where[1] else at["tensor"]
            wholes[at["pipeline"], place, where] = values.flatten()
            if each[when][where] is not None:
                shares[at["pipeline"], place, where].append(each[when][where])
    assert shares.keys() == wholes.keys()
    for where, values in wholes.items():
        assert torch.equal(torch.cat(shares[where]), values), where


@pytest.mark.parametrize("name", layouts.tiered("masters", layouts.MASTERS))
def test_the_model_computes_with_rounded_master_weights(models, out, name):
    layout, found = read(out, name)
    file = load_file(models / layout.kind / "model.safetensors")
    for rank in found:
        assert rank["published"].keys() == rank["whole"].keys() == file.keys()
        for key, values in file.items():
            assert torch.equal(rank["whole"][key], values), key
            assert torch.equal(rank["published"][key], values.bfloat16()), key
        if name in STEPPED:
            assert all(torch.equal(rank["stepped"][key], values.bfloat16()) for key, values in rank["moved"].items())


@pytest.fixture(scope="module")
def by_transformers(models):
    """By kind: results of three small steps of the backend on Transformers, and how far its float32 weights moved."""
    made = {}

    def of(kind):
        if kind not in made:
            fields = {"optimizer": layouts.SMALL_STEPS, "max_grad_norm": None, "train_micro_batch_size": 3}
            config = HFPolicyConfig(model_name=str(models / kind), precision="bfloat16", **fields)
            worker = HFPolicyWorker(cases.make_context(), config)
            worker.setup()
            before = {name: master.detach().clone() for name, master in worker.state.masters.parameters.items()}
            results = []
            for number in range(3):
                rows = cases.make_rows(seed=100 + number)
                results.append(worker.train(rows, cases.NLL(), counts=cases.counts_of(rows))[0])
            moved = {name: master.detach() - before[name] for name, master in worker.state.masters.parameters.items()}
            made[kind] = results, cases.checkpoint_tensors(worker.model.model.config, moved)
        return made[kind]

    return of


def together(tensors):
    return torch.cat([tensors[name].float().flatten() for name in sorted(tensors)])


@pytest.mark.parametrize("name", layouts.tiered("masters", STEPPED))
def test_their_first_steps_are_those_of_the_backend_on_transformers(out, by_transformers, name):
    layout, found = read(out, name)
    results, expected = by_transformers(layout.kind)
    # Activations are rounded to 8 bits in other places, over four layers: 0.034 was seen. In a mixture a token may go to
    # another expert for it: 0.086.
    tolerance = 0.15 if "moe" in layout.kind else 0.06
    for rank in found:
        moved = {key: values - rank["whole"][key] for key, values in rank["moved"].items()}
        assert moved.keys() == expected.keys()
        assert float((together(moved) - together(expected)).norm()) < tolerance * float(together(expected).norm())
        assert [step.grad_norm for step in rank["steps"]] == pytest.approx([step.grad_norm for step in results], rel=0.02)


@pytest.mark.parametrize("name", layouts.tiered("masters", STEPPED))
def test_exported_weights_move_as_much_as_the_master_weights_on_average(out, name):
    """A few weights near a rounding boundary cross it, by far more than they moved."""
    for rank in read(out, name)[1]:
        start, master = together(rank["whole"]), together(rank["moved"]) - together(rank["whole"])
        published = together(rank["stepped"]) - together(rank["published"])
        assert float((published != 0).float().mean()) < 0.1 < 0.9 < float((master != 0).float().mean())
        # The slope of one over the other: 0.94 to 1.03 were seen, for only a few thousand of 40,000 weights cross.
        assert float(published @ master / (master @ master)) == pytest.approx(1.0, abs=0.15)
        on_grid = start.bfloat16().float()
        unseen = (on_grid + master).bfloat16().float() - on_grid
        assert float(unseen @ master / (master @ master)) < 0.4
