"""Reading model folders: safetensors, index, checksums."""
