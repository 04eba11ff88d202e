"""Models: loading, conversion, the layer-by-layer decoder. Only here are transformers' insides touched."""
