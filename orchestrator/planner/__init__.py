"""Decides each step: how many replicas, who generates what, when to cut a tail, what to keep warm. Pure functions."""
