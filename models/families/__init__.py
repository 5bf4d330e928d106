"""Model families: a file each, with what sets it apart from Llama."""
