"""The next token: biases and penalties, min-p / top-k / top-p sampling, greedy choice, log probabilities."""
