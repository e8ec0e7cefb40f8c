"""What a training step costs before it has run: pure numbers, from shapes and parallelism alone."""
