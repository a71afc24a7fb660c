"""The retrieval server: an index behind Search-R1's protocol."""
