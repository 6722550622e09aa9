"""Models that share sequences out over ranks."""
