"""Rounds: token speculation without loss. Tokens are drafted, verified together, and the right ones are kept."""
