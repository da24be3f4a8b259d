"""What can be set in a run: the schema, its loader and one YAML file per run.

Invariant: importing this package costs milliseconds and needs neither torch, Redis nor HTTP, so that `lagrange check`
runs on any machine.
"""

from configs.load import ConfigError, load_config, save_config
from configs.schema import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_config", "save_config"]
