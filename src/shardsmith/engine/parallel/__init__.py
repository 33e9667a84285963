"""One file an axis: how the engine carries out what `layout/axes` states."""
