"""`shardsmith generate FOLDER --prompt TEXT`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from shardsmith import api
from shardsmith.cli.common import Amount, Answer, verb


@click.command("generate")
@verb
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, help="Text to go on from; may be repeated. Default: an empty one.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(1), help="How many tokens, at most.")
@click.option(
    "--temperature",
    default=0.0,
    show_default=True,
    type=Amount(most=1e6, zero=True),
    help="0: the most likely token each time; above: drawn, the higher the freer.",
)
@click.option(
    "--top-k", default=0, show_default=True, type=click.IntRange(0), help="Draw among the K likeliest; 0: all."
)
@click.option("--seed", default=0, show_default=True, help="Seed of what is drawn.")
@click.option("--tokenizer", help="byte, a tokenizer.json, or a folder with one. Default: that of FOLDER.")
def command(
    folder: Path,
    prompts: tuple[str, ...],
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    tokenizer: str | None,
) -> Answer:
    """Let the weights of FOLDER go on with a text: a run, a checkpoint, or a Hugging Face folder.

    In one process on the CPU, the whole context computed again for each token: to look at a model, not to serve it.
    """
    found = api.generate(
        folder,
        prompts or ("",),
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        tokenizer=tokenizer,
    )
    return Answer(
        data={"folder": str(folder), "samples": [asdict(sample) for sample in found]},
        show=tuple(sample.prompt + sample.text for sample in found),
    )
