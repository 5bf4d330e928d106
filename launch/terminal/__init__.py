"""Shared code of the commands: flags, prompts, output."""
