"""A text file as token ids to measure on, through the tokenizer of a checkpoint.

It must not know what is measured.
"""

from __future__ import annotations

from pathlib import Path

from bitnet_ops.config import ModelConfig
from bitnet_ops.convert.errors import refuse

PIECE_TOKENS = 512  # a plain forward's attention is quadratic
MAX_TOKENS = 4096


def text_sequences(folder: Path, config: ModelConfig, text: Path) -> list[list[int]]:
    """The first MAX_TOKENS tokens of the UTF-8 file `text`, in pieces that fit the context.

    Raises ConvertError: no tokenizer.json in `folder`, no readable text, fewer than two tokens, or
    a tokenizer with more ids than the model.
    """
    if not (folder / "tokenizer.json").is_file():
        refuse("text-tokenizer", f"tokenizer.json in {folder}", "none", "a text needs a tokenizer")
    from bitnet_ops.generate.tokenizer import Tokenizer

    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        refuse("text-file", f"a UTF-8 text file {text}", str(error))
    ids = Tokenizer.from_dir(folder).encode(content)[:MAX_TOKENS]
    if len(ids) < 2:
        refuse("text-file", f"some words in {text}", f"{len(ids)} tokens")
    if max(ids) >= config.vocab_size:
        found = f"id {max(ids)}"
        refuse("text-tokenizer", f"token ids below vocab_size {config.vocab_size}", found)
    size = min(PIECE_TOKENS, config.max_position_embeddings)
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
    return [piece for piece in pieces if len(piece) > 1]
