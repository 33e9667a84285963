"""What a training step of our own engine holds: its lowered program played with sizes in the place of tensors."""
