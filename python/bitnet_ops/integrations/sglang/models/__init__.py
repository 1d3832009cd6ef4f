"""Model files that SGLang finds by SGLANG_EXTERNAL_MODEL_PACKAGE: one module per architecture.

SGLang imports every module of this package by itself. It must not know our own models or engine.
"""
