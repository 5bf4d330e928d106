"""Quality: bits per byte, recall, hit rates."""
