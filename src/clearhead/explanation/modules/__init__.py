"""Explanations of modules: what they project, turn and add before and after attention."""
