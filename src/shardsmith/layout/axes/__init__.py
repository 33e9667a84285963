"""One file an axis: what it shards, sends, needs and forbids."""
