"""The model: its files, its blocks, its tokens. Knows nothing of nodes or jobs."""
