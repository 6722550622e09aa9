"""Values that are computed from recorded calls; no call is changed."""
