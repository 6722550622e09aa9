"""Models of transformers that run on clearhead, on one process or several."""
