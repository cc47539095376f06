"""`python -m functions.server`: one replica of a function."""

from functions.server.app import main

main()
