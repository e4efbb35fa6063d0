"""Where processes of a run meet: addresses and stores of torch.distributed."""
