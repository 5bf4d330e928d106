"""The public engine, requests, loading and memory."""
