"""Record: what a checkpoint says beside its tensors, as readable JSON (`state.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shardsmith.errors import Code, Fault
from shardsmith.specs.job import Data, Optimisation
from shardsmith.specs.model import ModelSpec
from shardsmith.specs.parse import parse_table

NOT_WRITTEN = Code(
    code="F501",
    title="a checkpoint could not be written",
    because="a checkpoint is complete on all ranks or it is none; the earlier ones are as they were",
)
NOT_READ = Code(
    code="F502",
    title="a checkpoint could not be read",
    because="a tensor that is not read keeps whatever values it starts with",
)
OTHER_MODEL = Code(
    code="F503",
    title="checkpoint of another model",
    because="weights mean what they were trained to mean only in the model that they were trained in",
)
OTHER_DATA = Code(
    code="F504",
    title="checkpoint of a run on other data",
    because="the position in the data counts samples in an order that follows from these values; in another order "
    "samples would be repeated and left out",
)
NEWER = Code(
    code="F505",
    title="checkpoint in a newer format",
    because="what a newer version has added would silently be left out",
)

NO_OPTIMIZER = Code(
    code="F508",
    title="checkpoint without the state of this optimiser",
    because="moments that restart at zero make the loss jump or drift, and nothing would say why",
)

RECORD_FILE = "state.json"
FORMAT = 1
_RESET = 'resume without it by name: run.reset = ["optimizer"]'
_FREE = ("name", "init_std")
"""Fields of a model that change nothing once it is trained."""
_TRAINING = (*_FREE, "dropout", "attention_dropout")
"""Fields that say how a model is trained, not what it computes: they may change where a run begins with weights."""
_BALANCING = ("aux_loss", "z_loss", "bias_rate")
_REACH = ("context", "rope_theta", "rope_scaling", "window")
"""Fields that training on longer sequences changes on purpose: what the model computes, but no tensor."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """The optimiser's `kind`, its own count of `steps` (None: it keeps none) and the names of its `states`.

    `needs` are the states that it keeps by its settings; `states` is empty before its first step.
    """

    kind: str
    steps: int | None
    states: tuple[str, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Where a run stood: `step` steps done, `updates` of them not skipped, `samples` consumed by all ranks.

    The learning rate and the order of the data are functions of these and of the job. `model` and `data` are
    what must be the same on resume. `plan`, `world` and `dtype` are what it ran under: any other plan may load
    it. No `optimizer`: the tensors are weights alone, the start of a run.
    """

    step: int
    updates: int
    samples: int
    model: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    plan: str = ""
    world: int = 1
    dtype: str = "float32"
    optimizer: OptimizerRecord | None = None
    loss_scale: float = 1.0
    good_steps: int = 0
    format: int = FORMAT

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return parse_table(ModelSpec, self.model, source=RECORD_FILE, section="model")


def plain(what: Any) -> dict[str, Any]:
    """The fields of a dataclass as they come back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(what)))
    return found


def write_record(folder: Path, record: Record) -> None:
    """Write state.json."""
    (folder / RECORD_FILE).write_text(json.dumps(plain(record), indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> Record:
    """The record of a checkpoint. Raises `Refused`: not readable (F502, F101 to F103), a newer format (F505)."""
    path = folder / RECORD_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NOT_READ.refuse(f"{path} cannot be read: {error}") from error
    written = data.get("format") if isinstance(data, dict) else None
    if isinstance(written, int) and written > FORMAT:
        raise NEWER.refuse(f"{path} has format {written}", (str(path), f"format = {written}"), hint="update shardsmith")
    return parse_table(Record, data, source=str(path), section="")


def model_faults(saved: Mapping[str, Any], model: ModelSpec, source: str) -> list[Fault]:
    """Every field in which a saved model differs from `model`; one that was not yet known had its default."""
    defaults = {f.name: f.default for f in fields(ModelSpec) if f.default is not MISSING}
    return _differences(saved, plain(model), defaults, source, "model", OTHER_MODEL)


def start_faults(weights: ModelSpec, model: ModelSpec, source: str, hint: str = "") -> list[Fault]:
    """Why a run of `model` may not begin with `weights`, which stand in `source`: every field that differs.

    How far positions reach may change, with a warning, since that is what such a run is for; a table of learned
    positions may not. How experts are balanced is a matter of training.
    """
    reach = _REACH if model.positions == "rope" else ()
    faults = _differences(_computed(weights), _computed(model), {}, source, "model", OTHER_MODEL)
    return [_change(fault) if _key(fault) in reach else replace(fault, hint=hint) for fault in faults]


def _computed(model: ModelSpec) -> dict[str, Any]:
    """The fields of a model that say what it computes."""
    found = {key: value for key, value in plain(model).items() if key not in _TRAINING}
    if found["experts"] is not None:
        found["experts"] = {key: value for key, value in found["experts"].items() if key not in _BALANCING}
    return found


def _key(fault: Fault) -> str:
    return fault.message.split()[0].removeprefix("model.")


def _change(fault: Fault) -> Fault:
    message = f"model.{_key(fault)} is not what these weights were trained with: they are trained on with the new value"
    return replace(fault, severity="warning", message=message)


def data_faults(saved: Mapping[str, Any], data: Mapping[str, Any], source: str) -> list[Fault]:
    """Every value in which the data of a checkpoint differ from those of the job; see `model_faults`."""
    faults = _differences(saved, data, plain(Data()), source, "data", OTHER_DATA)
    hint = 'take the value of the checkpoint, or begin these data from their start: run.reset = ["data"]'
    return [OTHER_DATA.fault(f.message, *f.values, hint=hint) for f in faults]


def needed_states(optimisation: Optimisation) -> tuple[str, ...]:
    """Tensors that the optimiser keeps of each parameter, as torch names them."""
    if optimisation.optimizer == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if optimisation.momentum else ()


def optimizer_faults(saved: OptimizerRecord | None, optimisation: Optimisation, source: str) -> list[Fault]:
    """Why the optimiser of a job cannot go on from `saved`."""
    if saved is None:
        return []
    needs = needed_states(optimisation)
    missing = [key for key in needs if key not in saved.needs]
    if saved.kind == optimisation.optimizer and not missing:
        return []
    message = f"the checkpoint was written by {saved.kind} and has no {' and no '.join(missing)}"
    if not missing:
        message = f"the checkpoint was written by {saved.kind}, whose states {optimisation.optimizer} does not continue"
    said = ((source, f"optimizer = {saved.kind}"), ("job", f"optimizer = {optimisation.optimizer}"))
    return [NO_OPTIMIZER.fault(message, *said, hint=_RESET)]


def missing_part(source: str) -> Fault:
    """The fault of a checkpoint whose optimiser part is gone."""
    return NO_OPTIMIZER.fault(f"{source} has no folder optimizer/", (source, "no optimizer/"), hint=_RESET)


def _differences(
    saved: Mapping[str, Any],
    stated: Mapping[str, Any],
    defaults: Mapping[str, Any],
    source: str,
    table: str,
    code: Code,
) -> list[Fault]:
    faults = []
    for key in dict.fromkeys([*stated, *saved]):
        before, now = (side.get(key, defaults.get(key)) for side in (saved, stated))
        if before != now and not (table == "model" and key in _FREE):
            said = ((source, f"{key} = {json.dumps(before)}"), ("job", f"{key} = {json.dumps(now)}"))
            faults.append(code.fault(f"{table}.{key} is not what the checkpoint was written with", *said))
    return faults
