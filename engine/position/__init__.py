"""Positions: rotary embeddings and the rotation of cached keys to another position."""
