"""What lets a model play episodes: transformers in this process, vLLM, or a server that writes for us."""
