"""From token ids to text: the engine, sampling, tokenizers, chat templates and histories."""
