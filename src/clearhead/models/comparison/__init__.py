"""What differs between two recordings, or between two backends."""
