"""Imported by the server of forked.py: it forks processes that find all loaded, as those of a node agent do."""

import gc

from functions.server.agent import preload
from functions.server.forkserver import KINDS

gc.disable()  # nothing of this is garbage
preload(KINDS, None)
gc.freeze()
gc.enable()
