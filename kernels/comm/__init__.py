"""Memory that GPUs write into each other's: LL packets, partial sums, the state of a pair."""
