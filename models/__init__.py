"""The Llama model, checkpoints, tokenizers and the demo model."""
