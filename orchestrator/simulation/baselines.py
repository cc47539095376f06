"""Policies that `simulate` compares the adaptive one with: a reserved cluster, and two systems that were published.

None streams its training or has a tail function. RollPacker's rounds are no policy (bench/papers/tail_batching.py).
"""

from orchestrator.planner.policies import ADAPTIVE, Policy

SERVERFUL = Policy("serverful", "all", "balanced", "never", "no", keep=True, prewarm=False, colocated=True)
RLHFUSE = Policy("rlhfuse", "all", "balanced", "fixed", "yes", keep=True, prewarm=False, colocated=True)
RLHFLESS = Policy("rlhfless", "weighted", "similar", "fixed", "no", keep=False, prewarm=True, colocated=False)
POLICIES = {policy.name: policy for policy in (SERVERFUL, RLHFUSE, RLHFLESS, ADAPTIVE)}
