"""Audits: what calls of a model allow beside a mask, and what its backends compute beside the formula."""
