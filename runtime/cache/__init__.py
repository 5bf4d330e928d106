"""KV caches of one rank."""
