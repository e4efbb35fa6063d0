"""The losses of rl_train keep the promises of losses."""

from rl_core.testing import LossConformance

BOUNDS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 1.1,
    "truncated_importance_sampling_ratio_min": 0.95,
}
CASES = {
    "ClippedPG": ("clipped_pg", {}),
    "DualClip": ("clipped_pg", {"ratio_clip_c": 1.2, "reference_policy_kl_penalty": 0.1}),
    "SequenceMask": ("clipped_pg", {**BOUNDS, "truncated_importance_sampling_type": "seq-mask-tis"}),
    "ToTheSampler": ("clipped_pg", {"ratio_to": "sampler", "reference_policy_kl_penalty": 0.1}),
    "GRPO": ("grpo", {}),
    "DAPO": ("dapo", {}),
    "DrGRPO": ("dr_grpo", {"constant_length_normalizer": 9}),
    "GSPO": ("gspo", {**BOUNDS, "ratio_clip_c": 1.05, "reference_policy_kl_penalty": 0.1}),
    "CISPO": ("cispo", {**BOUNDS, "truncated_importance_sampling_type": "icepop"}),
    "GSPOSequence": ("gspo_sequence", {**BOUNDS, "ratio_clip_c": 1.05}),
    "DPPO": ("dppo", {"divergence_max_above": 0.02, "divergence_max_below": 0.02}),
    "DPPOOfKL": ("dppo", {"divergence": "kl", "ratio_to": "policy", "log_ratio_penalty": 0.1, **BOUNDS}),
    "SAPO": ("sapo", {**BOUNDS, "reference_policy_kl_penalty": 0.1}),
    "GMPO": ("gmpo", {**BOUNDS, "log_ratio_clip_max": 0.1, "log_ratio_clip_min": 0.1}),
    "VESPO": ("vespo", {"ratio_to": "sampler"}),
    "ClipCov": ("clip_cov", {**BOUNDS, "reference_policy_kl_penalty": 0.1}),
    "KLCov": ("kl_cov", {**BOUNDS, "truncated_importance_sampling_type": "icepop"}),
    "DPO": ("dpo", {}),
    "IPO": ("ipo", {}),
    "Hinge": ("dpo_hinge", {}),
    "SimPO": ("simpo", {}),
    "ORPO": ("orpo", {}),
    "KTO": ("kto", {"desirable_weight": 1.5}),
    "TopK": ("distillation", {"topk": 4}),
    "TopKOfSequences": ("distillation", {"topk": 4, "token_level_loss": False}),
    "ReverseKL": ("distillation", {"topk": None, "divergence": "reverse_kl"}),
    "BradleyTerry": ("bradley_terry", {}),
    "NLL": ("nll", {}),
    "MseValue": ("mse_value", {}),
}
for name, (component, config) in CASES.items():
    attributes = {"component": component, "config": config, "trains_last_token_only": component == "bradley_terry"}
    globals()[f"Test{name}"] = type(f"Test{name}", (LossConformance,), attributes)
