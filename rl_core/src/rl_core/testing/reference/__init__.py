"""The independent reference of the conformance kit: a small Llama in plain torch, its weights, and a policy that sends them."""
