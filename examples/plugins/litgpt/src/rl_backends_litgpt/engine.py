"""The engine: LitGPT's cache of keys and values, in which each row in flight has a slot."""

import torch
from torch.nn.utils.rnn import pad_sequence

from rl_backends_base import TokenwiseWorker
from rl_backends_litgpt import model as litgpt_model


class LitGPTEngineWorker(TokenwiseWorker):
    """One replica. `row.state` is the slot of a row."""

    def build(self):
        self._slots, self._cache = 0, []
        model = litgpt_model.load(self.config.model_name)
        longest = model.config.block_size
        model.max_seq_length = min(self.config.max_model_len or longest, longest)  # length of the cache
        return model

    def facts(self):
        return {"vocab_size": self.model.config.vocab_size, "max_model_len": self.model.max_seq_length}

    def prefill(self, rows):
        ids = pad_sequence([self._tensor(row.sequence) for row in rows], batch_first=True)
        new = self._new_cache(len(rows))
        logits = self._forward(new, ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous())
        self._take_slots(rows, new)
        return logits[torch.arange(len(rows)), self._tensor([len(row.sequence) - 1 for row in rows])]

    def decode(self, rows):
        ids, positions = ([[row.tokens[-1]] for row in rows], [[len(row.sequence) - 1] for row in rows])
        return self._forward(self._cache, self._tensor(ids), self._tensor(positions))[:, -1]

    def keep(self, rows):
        slots = self._tensor([row.state for row in rows])
        self._slots, self._cache = len(rows), self._cache if rows else []
        for layer in self._cache:
            layer.k[: len(rows)], layer.v[: len(rows)] = layer.k[slots], layer.v[slots]
        for slot, row in enumerate(rows):
            row.state = slot

    def _take_slots(self, rows, new):
        """Copy the keys and values of new rows into the slots after those in use."""
        first, self._slots = self._slots, self._slots + len(rows)
        if not self._cache or self._slots > len(self._cache[0].k):
            old, self._cache = self._cache, self._new_cache(2 * self._slots)
            for layer, before in zip(self._cache, old, strict=False):
                layer.k[:first], layer.v[:first] = before.k[:first], before.v[:first]
        for layer, own in zip(self._cache, new, strict=True):
            layer.k[first : self._slots], layer.v[first : self._slots] = own.k, own.v
        for slot, row in enumerate(rows, start=first):
            row.state = slot

    def _new_cache(self, rows):
        model, weight = self.model, self.model.lm_head.weight
        model.set_kv_cache(rows, device=weight.device, dtype=weight.dtype)
        return [block.attn.kv_cache for block in model.transformer.h]

    def _forward(self, cache, ids, positions):
        for block, layer in zip(self.model.transformer.h, cache, strict=True):
            block.attn.kv_cache = layer
        logits = self.model(ids, input_pos=positions, input_pos_maxp1=int(positions.max()) + 1)
        return logits[..., : self.model.config.vocab_size]

    def _tensor(self, values):
        return torch.tensor(values, dtype=torch.int64, device=self.context.device)
