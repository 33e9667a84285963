"""Checkpoints: tensors by global name and logical shape, complete or refused, exact under any change of layout."""
