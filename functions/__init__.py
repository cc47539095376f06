"""What runs in the containers: the stages of an RLHF step, each a function. Never imports `orchestrator`."""
