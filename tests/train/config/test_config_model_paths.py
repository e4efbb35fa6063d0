"""Values of `model_name` that no file system can have as a path."""

from rl_core.config.section import model_path_problem


def test_a_name_that_is_too_long_for_a_path_is_a_name_of_the_hub():
    assert model_path_problem("x" * 5000) is None
    assert model_path_problem("x" * 5000 + ".gguf") == f"there is no GGUF file {'x' * 5000}.gguf."
