"""What torchrun puts into a process's environment. The one place outside `launch/` that reads it, or adds
to it; knows no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OTHERS = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")


def rank_environment() -> Mapping[str, str] | None:
    """The variables that describe this rank; None where the process is alone. ValueError where some are missing."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that there are several ranks, but {', '.join(missing)} "
            "are not set; start with torchrun, or unset WORLD_SIZE."
        )
    return {name: os.environ[name] for name in (*NEEDED, *OTHERS) if name in os.environ}


def without_multicast() -> None:
    """Torch sets up multicast for memory that ranks share, unless told not to. Nothing here uses it, and some machines
    answer with an error. Who wants it says so in the environment."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
