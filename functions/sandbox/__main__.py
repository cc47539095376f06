"""`python -m functions.sandbox`: the sandbox as a service."""

from functions.sandbox.server import main

main()
