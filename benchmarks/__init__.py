"""Benchmarks: exact, sketched and floor, interleaved in one run; ratios, not times."""
