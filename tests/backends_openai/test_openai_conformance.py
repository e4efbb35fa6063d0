"""An engine behind `rlcore serve` keeps the promises of generation backends."""

from kit_pictures import QwenVL
from openai_servers import ADMIN, KEY, updatable

from rl_core.testing import GenerationConformance, xfail
from rl_core.testing.generation import LIMIT


class TestOpenAI(GenerationConformance):
    component = "openai"
    test_impossible_prompts_are_refused = xfail(
        reason="only the server knows the vocabulary: its answer, status 400, names the token but is an HttpError"
    )

    picture_model = QwenVL()

    @classmethod
    def setup_class(cls):
        """Start a server for each model; their weights are updated through the folder of the tests."""
        super().setup_class()
        cls.servers = {}
        for model in (cls.picture_model, cls.model):
            folder = model.save(cls._folder / type(model).__name__, model.make_weights())
            url, _ = cls._exits.enter_context(updatable(cls._folder, model=folder, name="kit", max_new_tokens=LIMIT))
            cls.servers[model] = {"base_url": f"{url}/v1", "api_key": KEY, "model": "kit", "api": "inference"}

    @classmethod
    def section(cls):
        """The section with the server of the model that is tested."""
        updates = {"weight_updates": "rlcore", "admin_key": ADMIN}
        cls.config = {"openai_cfg": {**cls.servers[cls.model], **updates}, "refit_folder": str(cls._folder)}
        return super().section()
