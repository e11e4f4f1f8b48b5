"""The command line, `flexinfer`: one file a command. Nothing heavy is imported for --help."""

from flexinfer.cli.app import main

__all__ = ["main"]
