"""Functions of users: what they read, and their values on a part of the matrix."""
