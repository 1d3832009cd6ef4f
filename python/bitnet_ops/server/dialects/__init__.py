"""Dialects: each translates what its clients send into an Ask, and deltas into what they read."""
