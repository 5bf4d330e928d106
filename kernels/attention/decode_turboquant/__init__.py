"""What TurboQuant adds to decode attention over a quantised cache: the products with K and with V."""
