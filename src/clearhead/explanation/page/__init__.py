"""An explanation as one HTML page that computes: see `front/` for its program, one concern a file."""
