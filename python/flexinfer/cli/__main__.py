"""`python -m flexinfer.cli` is the `flexinfer` command."""

from flexinfer.cli.app import main

main()
