"""GGUF files as a source of conversions, and as what a model is exported to."""
