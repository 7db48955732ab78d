"""A kernel with everything it is launched with: what runs, and what is compiled without a GPU, is one and the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Multiply-adds keep the product exact and cost one instruction. Triton's default for it has changed before.
_FP_FUSION = True


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch that has not been made yet.

    Attributes:
        kernel: a Triton kernel.
        grid: programs.
        arguments: by name, constants of the kernel included.
        num_warps, num_stages: as Triton takes them.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        """Queues it on the current stream."""
        self.kernel[self.grid](**self.arguments, **self._options)

    def compile(self) -> Any:
        """Compiles the variant of the kernel that `run` would take; tensors may be without storage."""
        return self.kernel.warmup(grid=self.grid, **self.arguments, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": _FP_FUSION}
