"""Hugging Face folders as a source of conversions: files, names, what their config means."""
