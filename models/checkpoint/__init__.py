"""Read model folders: safetensors, index, checksums."""
