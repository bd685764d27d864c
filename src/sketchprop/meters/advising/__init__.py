"""``advise``: what fits a model, measured on it, and the one that pays, if any; ``trial``."""
