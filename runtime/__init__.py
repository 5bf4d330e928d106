"""Device groups, transports, caches, the step program and the engine."""
