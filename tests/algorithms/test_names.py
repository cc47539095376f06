"""What a job may name is what there is."""

from functions.algorithms import aggregation, kl, names
from functions.algorithms.advantages import ADVANTAGES
from functions.algorithms.policy_losses import POLICY_LOSSES


def test_names_are_those_of_the_functions() -> None:
    assert set(names.ADVANTAGES) == set(ADVANTAGES)
    assert set(names.POLICY_LOSSES) == set(POLICY_LOSSES)
    assert set(names.AGGREGATIONS) == set(aggregation.AGGREGATIONS)
    assert set(names.KL_KINDS) == set(kl.KL_KINDS)
