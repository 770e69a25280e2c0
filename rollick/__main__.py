"""`python -m rollick`."""

from rollick.cli import main

main()
