"""σ², V and where V is made."""
