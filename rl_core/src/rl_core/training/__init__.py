"""What a policy worker of any backend does alike: cut a batch, build what the config names, tell of a step; knows no model."""
