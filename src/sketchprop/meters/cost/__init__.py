"""FLOPs, bytes and seconds of a step."""
