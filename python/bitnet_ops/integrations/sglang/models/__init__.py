"""Model files that SGLang finds by SGLANG_EXTERNAL_MODEL_PACKAGE: one module per architecture."""
