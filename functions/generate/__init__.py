"""The generate function and its engines: samples from the policy, streamed as they finish."""
