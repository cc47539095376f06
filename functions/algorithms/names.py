"""The names that a job can choose from; estimators and losses are the functions of these names (advantages.py,
policy_losses.py). No torch: the orchestrator checks a job with them before anything runs."""

ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
    "gigpo",
    "distillation",
)
POLICY_LOSSES = ("vanilla", "gspo", "cispo", "importance_sampling")
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
