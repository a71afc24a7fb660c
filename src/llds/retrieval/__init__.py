"""Indexes of corpora on disk: built from files of any size, searched by BM25, vectors, or both."""
