"""Checkpoints on disk: Hugging Face directories in and out, the functional format, every header checked."""
