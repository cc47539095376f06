"""Environments: what answers a policy's turns. A function without a GPU, called once for each turn of an episode."""
