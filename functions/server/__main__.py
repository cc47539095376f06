"""`python -m functions.server`: one replica of a function; on a node with an agent, the ticket of one (ticket.py)."""

import os

if "RLHF_AGENT" in os.environ:
    from functions.server.ticket import main
else:
    from functions.server.app import main

main()
