"""Resuming from a tampered checkpoint runs no code from it."""

import json
import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from rl_backends_base.data_only import DataOnlyReader, read_metadata
from rl_backends_base.training_state import DataOnlyPlanner
from rl_backends_hf import HuggingFacePolicy
from rl_core.errors import CheckpointError


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def planted(tmp_path):
    return Planted(tmp_path / "code-ran")


@pytest.fixture(scope="module")
def policy(model_folder):
    return HuggingFacePolicy(model_folder("llama"))


@pytest.fixture(scope="module")
def saved(policy, parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    policy.train(parts.make_rows(), parts.NLL())
    policy.save_checkpoint(folder / "weights", folder / "optimizer")
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def declare_bytes(folder, planted):
    """Metadata with allowed classes only, which declares a tensor as a bytes entry."""
    found = read_metadata(folder)
    found.state_dict_metadata = dict.fromkeys(found.state_dict_metadata, BytesStorageMetadata())
    for info in found.storage_data.values():
        info.relative_path, info.offset = "__0_0.distcp", 0
        torch.save(planted, folder / info.relative_path)
        info.length = (folder / info.relative_path).stat().st_size
    found.storage_meta = None
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def weights_as_pickle(folder, planted):
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": planted}, folder / "pytorch_model.bin")


def code_beside_weights(folder, planted):
    (folder / "planted.py").write_text(f"import os\nos.mkdir({str(planted.marker)!r})\n")
    config = json.loads((folder / "config.json").read_text())
    names = ("AutoConfig", "AutoModelForCausalLM")
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "planted", "auto_map": dict.fromkeys(names, "planted.X")})
    )


PLANTS = {
    "a pickle as metadata": lambda copy, planted: (copy / "optimizer" / ".metadata").write_bytes(pickle.dumps(planted)),
    "an entry of bytes": lambda copy, planted: declare_bytes(copy / "optimizer", planted),
    "a pickle as tensors": lambda copy, planted: torch.save(planted, copy / "optimizer" / "__0_0.distcp"),
    "a pickle as trainer state": lambda copy, planted: torch.save(planted, copy / "optimizer" / "trainer.pt"),
    "a plain pickle as trainer state": lambda copy, planted: (copy / "optimizer" / "trainer.pt").write_bytes(
        pickle.dumps(planted)
    ),
    "a pickle as random state": lambda copy, planted: torch.save({"torch": planted}, copy / "optimizer" / "rng-00000.pt"),
    "a pickle as weights": lambda copy, planted: weights_as_pickle(copy / "weights", planted),
    "code beside the weights": lambda copy, planted: code_beside_weights(copy / "weights", planted),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("forced", [False, True])
def test_a_resume_runs_no_code_of_the_checkpoint(policy, copy, planted, plant, forced, monkeypatch):
    if forced:  # the variable by which users make torch load pickles
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    PLANTS[plant](copy, planted)
    with pytest.raises(CheckpointError) as refused:
        policy.load_checkpoint(copy / "weights", copy / "optimizer")
    assert not planted.marker.exists()
    assert "Traceback" not in str(refused.value)
    assert "weights_only" not in str(refused.value), "no advice to load it in a way that runs code"


def test_the_planted_object_runs_with_unrestricted_pickle_loading(planted):
    pickle.loads(pickle.dumps(planted))
    assert planted.marker.is_dir()


def test_metadata_cannot_name_files_outside_its_folder(copy):
    found = read_metadata(copy / "optimizer")
    next(iter(found.storage_data.values())).relative_path = "../weights/model.safetensors"
    found.storage_meta = None
    (copy / "optimizer" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match="which is not in its folder"):
        read_metadata(copy / "optimizer")


def test_entries_of_bytes_are_loaded_as_data(planted, tmp_path):
    from torch.distributed.checkpoint import load, save

    save({"data": {"a": [1, 2.5]}}, storage_writer=FileSystemWriter(tmp_path / "data"), no_dist=True)
    found = {"data": {"a": None}}
    load(found, storage_reader=DataOnlyReader(tmp_path / "data"), planner=DataOnlyPlanner(), no_dist=True)
    assert found == {"data": {"a": [1, 2.5]}}
    save({"data": planted}, storage_writer=FileSystemWriter(tmp_path / "code"), no_dist=True)
    with pytest.raises(CheckpointException) as refused:
        load({"data": None}, storage_reader=DataOnlyReader(tmp_path / "code"), planner=DataOnlyPlanner(), no_dist=True)
    assert "The entry data was not loaded" in str(refused.value.failures)
    assert not planted.marker.exists()
