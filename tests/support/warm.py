"""Imported by the server of forked.py: it forks processes that find all loaded, as those of a node agent do."""

import gc
from importlib import import_module

LOADED = (
    "functions.generate.function", "functions.reference.function", "functions.train.function", "functions.server.app",
    "functions.exchange.redis", "functions.exchange.s3", "orchestrator.commands.run", "orchestrator.commands.resume",
    "orchestrator.api.server", "orchestrator.api.launch_kubernetes", "peft", "tests.support.gang",
    "tests.support.forked",
)  # fmt: skip

gc.disable()  # nothing of this is garbage
for name in LOADED:
    import_module(name)
agent, forkserver = import_module("functions.server.agent"), import_module("functions.server.forkserver")
agent.preload(forkserver.KINDS, None)
gc.freeze()
gc.enable()
