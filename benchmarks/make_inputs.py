"""Write the common tokens and initial weights into a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from inputs import TOKENS_FILE, WEIGHTS_FILE, token_stream
from setups import MODEL
from workload import GLOBAL_BATCH, SEED

from shardsmith.engine.models.initialise import full_rows
from shardsmith.specs.model import weights


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / TOKENS_FILE, token_stream(steps * GLOBAL_BATCH))
    torch.save({w.name: full_rows(w, SEED, 0, w.shape[0]) for w in weights(MODEL)}, folder / WEIGHTS_FILE)


if __name__ == "__main__":
    main()
