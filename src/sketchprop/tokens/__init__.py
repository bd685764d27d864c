"""Kept tokens: the backward of transformer blocks on the tokens that carry it."""
