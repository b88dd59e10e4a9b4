"""`python -m prep`: the command line `prep` of this very interpreter."""

from prep.cli import main

main()
