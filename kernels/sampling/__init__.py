"""The next token: top-k / top-p sampling, greedy choice, the end of a step."""
