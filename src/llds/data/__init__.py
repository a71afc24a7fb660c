"""Question sets and corpora: readers of the formats people have, and the data shipped with the package."""
