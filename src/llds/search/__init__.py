"""The tool-use episode: its protocol, the retrievers, the runner with the feedback mask, and the rewards."""
