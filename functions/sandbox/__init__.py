"""Programs that a model wrote, run where they can do no harm: no network, no token, nothing to write to but a folder of
their own, limits on all they can take; fresh for each run, and nothing of them is left when it ends."""
