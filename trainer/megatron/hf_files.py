"""The files of a Hugging Face folder: which tensor is where, and what else belongs to a model.

Invariant: pure file handling, no torch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import safe_open

from configs.load import ConfigError

INDEX = "model.safetensors.index.json"
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def weight_files(folder: Path) -> dict[str, str]:
    """Tensor name to file name. Raises ConfigError if the folder has no safetensors or its index cannot be read."""
    index = folder / INDEX
    if index.exists():
        try:
            found: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{index}: not a usable index ({error!r}).") from error
        return found
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: no *.safetensors there. model.path must name a Hugging Face folder.")
    where: dict[str, str] = {}
    for file in files:
        with safe_open(str(file), framework="np") as opened:
            where |= dict.fromkeys(opened.keys(), file.name)
    return where


def copy_companions(source: Path, target: Path, dtype: str) -> None:
    """Copy tokenizer files as they are, and config.json with the dtype of the weights next to it."""
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
