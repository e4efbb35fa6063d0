"""An engine behind `rlcore serve` keeps the promises of generation backends."""

from openai_servers import ADMIN, KEY, updatable

from rl_core.testing import GenerationConformance, xfail
from rl_core.testing.generation import LIMIT
from rl_core.testing.reference import Llama


class TestOpenAI(GenerationConformance):
    component = "openai"
    test_impossible_prompts_are_refused = xfail(
        reason="only the server knows the vocabulary: its answer, status 400, names the token but is an HttpError"
    )

    @classmethod
    def setup_class(cls):
        """Start the server with the kit's model; its weights are updated through the folder of the tests."""
        super().setup_class()
        model = Llama().save(cls._folder / "model", Llama().make_weights())
        url, _ = cls._exits.enter_context(updatable(cls._folder, model=model, name="kit", max_new_tokens=LIMIT))
        server = {"base_url": f"{url}/v1", "api_key": KEY, "model": "kit", "weight_updates": "rlcore", "admin_key": ADMIN}
        cls.config = {"openai_cfg": server, "refit_folder": str(cls._folder)}
