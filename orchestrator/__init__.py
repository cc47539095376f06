"""Decides: which replicas of which function exist when, and who gets which share of the work. Imports no torch."""
