"""The sizes of matrices that the worker reports are those of the Transformers backend, which torch confirms."""

import megatron_cases as cases
import pytest

from rl_backends_hf.matrix_sizes import matrix_sizes as sizes_of_model
from rl_backends_megatron.model import matrix_sizes

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "qwen3-moe", "mixtral"])
def test_matrices_of_a_checkpoint_have_the_sizes_of_the_same_model_in_transformers(models, kind):
    model = cases.plain_model(models / kind)
    shapes = {name: tuple(tensor.shape) for name, tensor in cases.checkpoint_weights(model).items()}
    assert matrix_sizes(shapes, model.config, tied=model.config.tie_word_embeddings) == sizes_of_model(model)
