"""From what people have (a folder, a file, a model id) to the tensors of a model, ready to run."""
