"""Minimal streaming workers: a row of n tokens ends after n ticks unless the request differs."""

from __future__ import annotations

import os
import signal
import time

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError, UserError

DIES, FAILS, IS_BAD, SLEEPS = -1, -2, -3, -5
"""First tokens of rows that do so when they arrive."""
FOREVER = 10**9
"""Number of ticks of a row that ends only on request."""
TICK_S = 0.01


class TickingWorker:
    """The answers contain the rank that produced them; rows with `stream_tokens` are also returned while they tick."""

    def __init__(self, context):
        self.context = context
        self.left = {}
        self.streaming = set()
        self.calls = self.ticks = 0
        self.closed = []

    def poll(self, arrivals, *, cancelled=(), wait_s=0.1):
        self.calls += 1
        for name in cancelled:
            self.left.pop(name, None)
        answers = {}
        for arrival in arrivals:
            first, ticks = int(arrival.row["input_ids"][0, 0]), int(arrival.row["input_lengths"][0])
            if first == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            elif first == FAILS:
                raise UserError("this worker fails")
            elif first == IS_BAD:
                answers[arrival.name] = DataError("this row is bad")
            elif first == SLEEPS:
                time.sleep(3600)
            else:
                self.left[arrival.name] = ticks
                if "stream_tokens" in arrival.row and arrival.row["stream_tokens"][0]:
                    self.streaming.add(arrival.name)
        until = time.monotonic() + (0 if answers else wait_s)
        while self.left and not answers:
            answers = self._tick()
            if time.monotonic() >= until:
                break
        rank = torch.tensor([self.context.rank])
        streamed = [name for name in self.left if name in self.streaming]
        return answers | {name: BatchedDataDict(rank=rank, unfinished=torch.tensor([True])) for name in streamed}

    def in_flight(self):
        return sorted(self.left)

    def close_sessions(self, sessions):
        self.closed += sessions

    def closed_sessions(self):
        return self.closed

    def end_all(self):
        self.left = dict.fromkeys(self.left, 1)

    def number_of_calls(self):
        return self.calls

    def _tick(self):
        time.sleep(TICK_S)
        self.ticks += 1
        self.left = {name: ticks - 1 for name, ticks in self.left.items()}
        done = [name for name, ticks in self.left.items() if ticks <= 0]
        for name in done:
            del self.left[name]
        return {name: BatchedDataDict(rank=torch.tensor([self.context.rank])) for name in done}
