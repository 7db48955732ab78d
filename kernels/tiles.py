"""Tile sizes of the attention kernel, from `tuned/*.json`: nothing is tuned while a job runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch

from batchkv.errors import UserError


@dataclass(frozen=True, slots=True)
class Tile:
    """One variant of the attention kernel.

    Attributes:
        block_m: rows: queries x heads.
        block_n: keys read at a time.
        num_warps, num_stages: as Triton takes them.
        keys_per_item: keys that one item goes over at most. Its states cost `4 * block_m / keys_per_item` of what
            its keys and values do (fp32 written and read, against two bytes an element).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    keys_per_item: int


@dataclass(frozen=True, slots=True)
class TileTable:
    """The tiles of one target.

    Attributes:
        target: its name.
        by_head_dim: tiles by ascending `block_m`, by the largest head dim that they are for.
    """

    target: str
    by_head_dim: dict[int, tuple[Tile, ...]]

    def tiles(self, head_dim: int) -> tuple[Tile, ...]:
        """For heads of this dim.

        Raises:
            UserError: there are none for so large a head.
        """
        fitting = [dim for dim in self.by_head_dim if dim >= head_dim]
        if not fitting:
            largest = max(self.by_head_dim)
            raise UserError(f"no kernel on {self.target} for heads of {head_dim}, at most {largest}: use --device cpu")
        return self.by_head_dim[min(fitting)]


@cache
def load_tiles(target: str) -> TileTable:
    """The table of a target (`sm_90`), or the nearest one below it: `sm_86` takes that of `sm_80`.

    Raises:
        ValueError: there is none.
    """
    name = _nearest(target)
    table = json.loads(files(__package__).joinpath("tuned", f"{name}.json").read_text())
    return TileTable(target, {int(dim): tuple(Tile(**tile) for tile in tiles) for dim, tiles in table.items()})


def _nearest(target: str) -> str:
    known = sorted(path.name.removesuffix(".json") for path in files(__package__).joinpath("tuned").iterdir())
    if target in known:
        return target
    if target.startswith("sm_"):
        older = [name for name in known if name.startswith("sm_") and int(name[3:]) <= int(target[3:])]
        if older:
            return max(older, key=lambda name: int(name[3:]))
    if target.startswith("gfx9"):
        return "gfx942"
    raise ValueError(f"no tiles for {target}: there are some for {', '.join(known)}")


def target_of(device: torch.device) -> str:
    """What `load_tiles` calls a device; a CPU is Triton's interpreter."""
    if device.type == "cpu":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; one of the interpreter."""
    return 1 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)
