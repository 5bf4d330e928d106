"""TurboQuant: tokens after a rotation, each coordinate by a Lloyd-Max codebook."""
