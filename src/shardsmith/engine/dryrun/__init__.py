"""The real training step of any rank of any world on tensors without data: its memory, collectives and FLOPs."""
