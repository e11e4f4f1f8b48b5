"""The command line: `flexinfer demo`, `flexinfer chat`. Nothing heavy is imported for --help."""

from flexinfer.cli.app import main

__all__ = ["main"]
