"""Layers and what they are made of: ternary linears, heads, KV caches, adapters, packed weights.

Usable on their own with torch; they know no models and no files.
"""
