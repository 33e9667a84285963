"""What foreign software does, declared feature by feature in one TOML file a target."""

from shardsmith.design.targets.schedules import software_faults
from shardsmith.design.targets.server import Server, server_named, server_names
from shardsmith.design.targets.target import FLOAT8, Attention, Elementwise, Memory, Target, target_named, target_names

__all__ = [
    "FLOAT8",
    "Attention",
    "Elementwise",
    "Memory",
    "Server",
    "Target",
    "server_named",
    "server_names",
    "software_faults",
    "target_named",
    "target_names",
]
