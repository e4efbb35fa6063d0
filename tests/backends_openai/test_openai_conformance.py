"""An engine behind `rlcore serve` keeps the promises of generation backends."""

from typing import ClassVar

import pytest
from kit_pictures import QwenVL
from openai_servers import ADMIN, KEY, updatable

from rl_core.testing import GenerationConformance, xfail
from rl_core.testing.generation import LIMIT, TEMPERATURE


class TestOpenAI(GenerationConformance):
    component = "openai"
    test_impossible_prompts_are_refused = xfail(
        reason="only the server knows the vocabulary: its answer, status 400, names the token but is an HttpError"
    )

    picture_model = QwenVL()
    engine: ClassVar = {}

    @classmethod
    def setup_class(cls):
        """Start a server for each model; their weights are updated through the folder of the tests."""
        super().setup_class()
        cls.servers = {}
        for model in {cls.picture_model, cls.model}:
            folder = model.save(cls._folder / type(model).__name__, model.make_weights())
            url, _ = cls._exits.enter_context(
                updatable(cls._folder, model=folder, name="kit", max_new_tokens=LIMIT, **cls.engine)
            )
            cls.servers[model] = {"base_url": f"{url}/v1", "api_key": KEY, "model": "kit", "api": "inference"}

    @classmethod
    def section(cls):
        """The section with the server of the model that is tested."""
        updates = {"weight_updates": "rlcore", "admin_key": ADMIN}
        cls.config = {"openai_cfg": {**cls.servers[cls.model], **updates}, "refit_folder": str(cls._folder)}
        return super().section()


VLLM = {"precision": "float32", "max_model_len": 128, "max_num_seqs": 16, "kv_cache_gib": 0.05, "enforce_eager": True}


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_behind_rlcore_serve_samples_rows_with_their_images():
    overrides = [f"policy.generation.temperature={TEMPERATURE}"]
    overrides += [f"policy.generation.vllm_cfg.{name}={value}" for name, value in VLLM.items()]
    pictures = QwenVL()
    engine = {"backend": "vllm", "overrides": overrides}
    tests = type("Tests", (TestOpenAI,), {"picture_model": pictures, "model": pictures, "engine": engine})
    tests.setup_class()
    try:
        tests().test_rows_are_sampled_with_their_images()
    finally:
        tests.teardown_class()
