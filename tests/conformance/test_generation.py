"""The Transformers engine keeps the promises of generation backends."""

from kit_pictures import QwenVL

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.generation import HFGenerationWorker
from rl_core.errors import TransportDeclinedError
from rl_core.testing import GenerationConformance
from rl_core.testing.reference import Llama, ReferenceSender


class TestHF(GenerationConformance):
    component = "hf"
    picture_model = QwenVL()


class MergedWorker(HFGenerationWorker):
    def to_replaceable(self, tensors):
        raise TransportDeclinedError("its tensors are merged")


def test_an_engine_that_declines_weights_by_reference_gets_copies(tmp_path):
    model = Llama()
    sender = ReferenceSender(model.make_weights(), tmp_path)
    config = HFGenerationConfig(model_name=model.save(tmp_path / "model", model.make_weights(seed=4)))
    engine = DistributedGeneration(worker_class=MergedWorker, config=config)
    sender.refit(engine, ("by_reference", "shared_memory"))
    assert engine.weight_fingerprint() == sender.fingerprint(engine)
