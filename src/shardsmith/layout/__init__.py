"""What a plan does to a model: shards, collectives, memory, rules; composed from the axes."""
