"""The attention policies whose quality is measured: those of the table, and the curves of the plot.

dense_below=0: the texts are short, and the policies shall choose all the same.
"""

from __future__ import annotations

POLICIES = {
    "window 256 + 4": "window:256,sinks=4",
    "window 256, every 4th page": "window:256,sinks=4,stride=4",
    "top_k 1/4": "top_k:0.25,sinks=4,dense_below=0",
    "top_k 1/2": "top_k:0.5,sinks=4,dense_below=0",
    "threshold 0.1": "threshold:0.1,sinks=4,dense_below=0",
    "dynamic 0.1-0.5": "dynamic:min_ratio=0.1,max_ratio=0.5,sinks=4,dense_below=0",
    "dynamic 0.2-0.8": "dynamic:min_ratio=0.2,max_ratio=0.8,sinks=4,dense_below=0",
}
_RATIOS = ((0.05, 0.25), (0.1, 0.5), (0.2, 0.8), (0.4, 1))
CURVES = {
    "window": [f"window:{n},sinks=4" for n in (64, 128, 256, 384, 512, 768)],
    "top_k": [f"top_k:{r},sinks=4,dense_below=0" for r in (0.05, 0.25, 0.35, 0.5, 0.75)],
    "dynamic": [f"dynamic:min_ratio={a},max_ratio={b},sinks=4,dense_below=0" for a, b in _RATIOS],
    "threshold": [f"threshold:{t},sinks=4,dense_below=0" for t in (0.9, 0.7, 0.5, 0.3, 0.1)],
}
