"""Runs in an environment with mlx and mlx-lm: logits of an MLX package, to a JSON file."""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model

folder, prompts, out = map(Path, sys.argv[1:])
model, _ = load_model(folder)
ids = json.loads(prompts.read_text())
out.write_text(json.dumps([model(mx.array([row]))[0].astype(mx.float32).tolist() for row in ids]))
