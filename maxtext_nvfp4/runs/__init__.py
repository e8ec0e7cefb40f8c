"""What finished runs have left behind: reading them, comparing them, and training the twins to compare."""
