"""Rendezvous of a run's processes: addresses and stores of torch.distributed."""
