"""`python -m orchestrator.commands`: the command line where the script is not installed."""

import sys

from orchestrator.commands.main import main

sys.exit(main())
