"""Engines that compute wrongly with adapters; what they receive, digest and report is right."""

import torch
from torch.nn import functional
from wrong_plugins.engines import EngineOf

from rl_backends_hf.generation import HFGenerationWorker


class AdaptersOf(EngineOf):
    """An engine whose adapted layers call `added` of its worker."""

    capabilities = (*EngineOf.capabilities, "lora_adapters")


class Worker(HFGenerationWorker):
    """Replaces the forward hooks of adapted layers."""

    def expect_adapters(self, ranks):
        super().expect_adapters(ranks)
        self.layers = {name: self.model.get_submodule(name) for name in ranks}
        for name, layer in self.layers.items():
            layer._forward_hooks.clear()
            layer.register_forward_hook(lambda layer, given, output, name=name: output + self.added(name, layer, given[0]))

    def added(self, name, layer, x):
        return functional.linear(functional.linear(x, layer.lora_A.weight), layer.lora_B.weight) * layer.lora_scale


class Right(AdaptersOf):
    """The right control."""

    Worker = Worker


class LeavesOutTheScale(AdaptersOf):
    """Computes W x + B A x."""

    class Worker(Worker):
        def added(self, name, layer, x):
            return super().added(name, layer, x) / layer.lora_scale


class TransposesSquareMatrices(AdaptersOf):
    """Multiplies with A transposed if that has the same shape."""

    class Worker(Worker):
        def added(self, name, layer, x):
            first = layer.lora_A.weight
            reduced = functional.linear(x, first.T if first.shape[0] == first.shape[1] else first)
            return functional.linear(reduced, layer.lora_B.weight) * layer.lora_scale


class KeepsTheFirstAdapter(AdaptersOf):
    """Computes with a copy of the adapters of the first refit."""

    class Worker(Worker):
        def weights_changed(self):
            super().weights_changed()
            if not hasattr(self, "first") and hasattr(self, "layers"):
                self.first = {
                    name: (layer.lora_A.weight.clone(), layer.lora_B.weight.clone(), layer.lora_scale.clone())
                    for name, layer in self.layers.items()
                }

        def added(self, name, layer, x):
            first, second, scale = self.first[name]
            return functional.linear(functional.linear(x, first), second) * scale


class SwapsTwoLayers(AdaptersOf):
    """Adds the adapter of the keys to the values, and that of the values to the keys."""

    class Worker(Worker):
        def added(self, name, layer, x):
            other = name.replace("k_proj", "?").replace("v_proj", "k_proj").replace("?", "v_proj")
            return super().added(name, self.layers[other], x)


class ForgetsAdaptersInAPause(AdaptersOf):
    """Computes without adapters after it was finished and prepared again."""

    class Worker(Worker):
        paused = False

        def finish_generation(self):
            super().finish_generation()
            self.paused = True

        def refit_begins(self):
            super().refit_begins()
            self.paused = False

        def added(self, name, layer, x):
            return super().added(name, layer, x) * (not self.paused)


class AdaptsOnlyPrompts(AdaptersOf):
    """Adds adapters in the prefill, and not when it decodes."""

    class Worker(Worker):
        def added(self, name, layer, x):
            return super().added(name, layer, x) * (x.numel() > 24 * x.shape[-1])


class StreamsWithoutAdapters(AdaptersOf):
    """Adds adapters to complete batches, and not to rows that are streamed."""

    class Worker(Worker):
        streams = False

        def poll(self, arrivals, *, cancelled=(), wait_s=0.1):
            self.streams = True
            try:
                return super().poll(arrivals, cancelled=cancelled, wait_s=wait_s)
            finally:
                self.streams = False

        def added(self, name, layer, x):
            return super().added(name, layer, x) * (not self.streams)


class MergesEachRefit(AdaptersOf):
    """Adds every adapter to the weights that it computes with, and does not take the previous one off."""

    class Worker(Worker):
        def weights_changed(self):
            super().weights_changed()
            self.sums = getattr(self, "sums", {})
            for name, layer in getattr(self, "layers", {}).items():
                merged = layer.lora_scale * layer.lora_B.weight @ layer.lora_A.weight
                self.sums[name] = self.sums.get(name, torch.zeros(())) + merged

        def added(self, name, layer, x):
            return functional.linear(x, self.sums[name])


class KeepsTheFirstScale(AdaptersOf):
    """Takes A and B of each refit, and the scale of the first one."""

    class Worker(Worker):
        scales = None

        def weights_changed(self):
            super().weights_changed()
            if self.scales is None and hasattr(self, "layers"):
                self.scales = {name: layer.lora_scale.clone() for name, layer in self.layers.items()}

        def added(self, name, layer, x):
            return super().added(name, layer, x) / layer.lora_scale * self.scales[name]


class RoundsAdapters(AdaptersOf):
    """Computes with adapters that are rounded to bfloat16."""

    class Worker(Worker):
        def added(self, name, layer, x):
            first, second = (each.weight.bfloat16().float() for each in (layer.lora_A, layer.lora_B))
            return functional.linear(functional.linear(x, first), second) * layer.lora_scale


class AcceptsAdaptersOfUnknownLayers(AdaptersOf):
    """Ignores adapters of layers that it does not have."""

    class Worker(Worker):
        def prepare_refit_info(self, info):
            own = dict(self.model.named_modules())
            known = {name: form for name, form in info.items() if ".lora_" not in name or name.partition(".lora_")[0] in own}
            return super().prepare_refit_info(known)
