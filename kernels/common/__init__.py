"""What every kernel uses: launching, dependent launch, small device helpers."""
