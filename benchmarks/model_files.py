"""The files of one model in the two forms that peers take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchkv.gguf_cache import cache_folder, load_converted


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model is.

    Attributes:
        safetensors: a folder with weights, config and tokenizer.
        gguf: the file that the folder was converted from; None if it was not.
    """

    safetensors: Path
    gguf: Path | None


def model_files(model: str) -> ModelFiles:
    """The files of what `--model` says; a GGUF file is converted, once, by batchkv's cache.

    Raises:
        UserError: the model cannot be found or converted.
    """
    import torch

    from batchkv.errors import UserError
    from batchkv.model_loader import load_model, load_tokenizer, resolve_model

    source = resolve_model(model)
    if source.gguf_path is None:
        if not Path(source.location).is_dir():
            raise UserError(f"--model {model!r}: give a folder or a GGUF file, as the peers load nothing from a hub")
        return ModelFiles(Path(source.location), None)
    weights = load_converted(
        source.gguf_path,
        "model",
        convert=lambda: load_model(source, "float32", torch.device("cpu")),
        load=lambda folder: folder,
    )
    load_tokenizer(source)  # makes its entry
    tokenizer = None if weights is None else weights.parent / "tokenizer"
    if weights is None or tokenizer is None or not tokenizer.is_dir():
        raise UserError("the converted model cannot be kept: set BATCHKV_CACHE to a writable folder")
    return ModelFiles(_merged(weights, tokenizer), source.gguf_path)


def _merged(weights: Path, tokenizer: Path) -> Path:
    """A folder of links to the files of both."""
    folder = cache_folder() / "benchmarks" / weights.parent.name
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*weights.iterdir(), *tokenizer.iterdir()):
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file)
    return folder
