"""The train function: one step of optimisation, from samples and their columns to the next version."""
