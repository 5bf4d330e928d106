"""Memory that several GPUs write: LL packets, partial sums, the state of a pair."""
