"""The names that a job can choose from; estimators and losses are the functions of these names (advantages.py,
policy_losses.py). No torch: the orchestrator checks a job with them before anything runs."""

ADVANTAGES = (
    "grpo", "dr_grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "gigpo",
    "distillation", "opo", "gpg", "grpo_passk", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline", "sft",
    "dpo", "bradley_terry",
)  # fmt: skip
POLICY_LOSSES = (
    "vanilla", "gspo", "cispo", "importance_sampling", "gpg", "dppo_tv", "dppo_kl", "sapo", "vespo", "clip_cov",
    "kl_cov", "geo_mean", "dro", "forward_kl_topk",
)  # fmt: skip
GIVEN = ("sft", "dpo", "bradley_terry")
"""Of advantages: those of responses that a data set gives (given.py); nobody scores them,"""
PAIRS = ("dpo", "bradley_terry")
"""and those of pairs."""
FIXED_AGGREGATION = dict.fromkeys(("gspo", "sapo", "geo_mean"), "seq-mean-token-mean")
"""Of losses that know one alone."""
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
