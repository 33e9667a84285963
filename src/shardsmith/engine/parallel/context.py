"""The context axis at work: every rank takes its part of each sequence, and attention spans the parts."""

from __future__ import annotations

from dataclasses import replace

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.runtime.sequence_parts import Parts


def attach(stage: Stage, parts: Parts) -> None:
    """Tell `stage` that it works on one of `parts`; a single part is the whole sequence."""
    if parts.count > 1:
        stage.parts = parts


def split(microbatch: Microbatch, parts: Parts) -> Microbatch:
    """This rank's part of a `microbatch` of whole sequences.

    Labels were shifted on the whole sequence and positions counted on it, so tokens, labels and positions are cut
    alike and no target is lost (cases A25, A26). Documents stay whole, since queries meet keys of all parts, and on the
    CPU, since what is to be computed follows from them.
    """
    if parts.count == 1:
        return microbatch
    return replace(
        microbatch,
        tokens=parts.split(microbatch.tokens, 1),
        labels=parts.split(microbatch.labels, 1),
        positions=parts.split(microbatch.positions, 1),
        documents=None if microbatch.documents is None else microbatch.documents.cpu(),
    )
