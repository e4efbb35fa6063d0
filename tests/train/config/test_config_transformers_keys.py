"""Keys of a Transformers generation config in `policy.generation`."""


def test_do_sample_and_the_padding_token_are_accepted_in_a_file_and_as_overrides(files, good):
    loaded = files.load(good.replace("max_new_tokens: 64", "max_new_tokens: 64\n    do_sample: true\n    pad_token_id: 0"))
    assert "do_sample" not in loaded.resolved["policy"]["generation"]
    assert files.load(good, "++policy.generation.do_sample=true").run == loaded.run


def test_an_end_of_sequence_token_is_explained_with_its_line(files, good):
    [error] = files.errors(good.replace("max_new_tokens: 64", "max_new_tokens: 64\n    eos_token_id: 2"))
    assert error.startswith(
        "config.yaml:6:3: policy.generation: eos_token_id is 2, but the end-of-sequence tokens of the model"
    )
    assert "did you mean 'stop_token_ids'" in error
