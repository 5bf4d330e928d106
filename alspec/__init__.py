"""alspec: multi-device speculative inference for Llama models."""
