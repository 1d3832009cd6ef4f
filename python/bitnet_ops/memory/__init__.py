"""Where tensors lie: one stretch of memory for many of them."""
