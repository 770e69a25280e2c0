"""`python -m rollick.cli`."""

from rollick.cli import main

main()
