"""What the commands share: flags, prompts, output."""
