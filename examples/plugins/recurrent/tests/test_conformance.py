"""The conformance tests of rlcore, with a model that is not in Transformers: one row at a time, without the base classes."""

import torch
from rl_backends_recurrent.model import RecurrentModel

from rl_core.testing import GenerationConformance, PackagingConformance, PolicyConformance, ReferenceModel
from rl_core.testing.reference import EOS, VOCABULARY


class Recurrence(ReferenceModel):
    """The equations of a GRU, one token after the other."""

    def make_weights(self):
        torch.manual_seed(0)
        model = RecurrentModel(vocab_size=VOCABULARY, hidden_size=32, num_layers=2)
        weights = {name: 0.6 * torch.randn_like(weight) for name, weight in model.state_dict().items()}
        weights["head.weight"][EOS] *= 2
        return weights

    def save_weights(self, folder, weights):
        model = RecurrentModel(vocab_size=VOCABULARY, hidden_size=32, num_layers=2)
        model.load_state_dict(weights)
        model.save(folder)

    def logits(self, weights, tokens):
        states, rows = [torch.zeros(32)] * 2, []
        for token in tokens:
            hidden = weights["embedding.weight"][token]
            for layer in range(2):
                hidden = states[layer] = _step(weights, layer, hidden, states[layer])
            rows.append(weights["head.weight"] @ hidden)
        return torch.stack(rows)


def _step(weights, layer, inputs, state):
    """The state of a layer after one more input; the gates are stacked as in torch: reset, update, new."""
    of_inputs, of_state = (
        weights[f"layers.weight_{kind}h_l{layer}"] @ vector + weights[f"layers.bias_{kind}h_l{layer}"]
        for kind, vector in (("i", inputs), ("h", state))
    )
    of_inputs, of_state = of_inputs.chunk(3), of_state.chunk(3)
    reset, update = (torch.sigmoid(of_inputs[gate] + of_state[gate]) for gate in range(2))
    return (1 - update) * torch.tanh(of_inputs[2] + reset * of_state[2]) + update * state


class TestPolicy(PolicyConformance):
    component = "recurrent"
    model = Recurrence()


class TestEngine(GenerationConformance):
    component = "recurrent"
    model = Recurrence()


class TestPackage(PackagingConformance):
    component = "recurrent"
