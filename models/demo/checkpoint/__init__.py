"""The bundled demo checkpoint (data files)."""
