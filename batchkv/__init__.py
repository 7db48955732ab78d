"""Offline batch inference for language models: plans the shared prefixes of a whole job."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from batchkv.errors import UserError

if TYPE_CHECKING:
    from batchkv.config import EngineConfig
    from batchkv.engine import Engine, plan
    from batchkv.job_plan import JobPlan
    from batchkv.rl.environment import Turn
    from batchkv.rl.mismatch import mismatch
    from batchkv.rl.rollout_batch import RolloutBatch
    from batchkv.rl.session import Session, rollout
    from batchkv.rl.trajectory import Branch, Trajectory
    from batchkv.rl.trl import trl_rollout_func
    from batchkv.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "Branch",
    "Engine",
    "EngineConfig",
    "JobPlan",
    "RolloutBatch",
    "SamplingParams",
    "Session",
    "Trajectory",
    "Turn",
    "UserError",
    "mismatch",
    "plan",
    "rollout",
    "trl_rollout_func",
]

# Imported when first used: torch and transformers take seconds, and a process that renders templates needs not
# even numpy.
_LAZY = {
    "Branch": "batchkv.rl.trajectory",
    "Engine": "batchkv.engine",
    "EngineConfig": "batchkv.config",
    "JobPlan": "batchkv.job_plan",
    "RolloutBatch": "batchkv.rl.rollout_batch",
    "SamplingParams": "batchkv.sampling_params",
    "mismatch": "batchkv.rl.mismatch",
    "Session": "batchkv.rl.session",
    "Trajectory": "batchkv.rl.trajectory",
    "Turn": "batchkv.rl.environment",
    "plan": "batchkv.engine",
    "rollout": "batchkv.rl.session",
    "trl_rollout_func": "batchkv.rl.trl",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'batchkv' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
