"""`python -m squall` is `squall`."""

from squall.cli import main

main()
