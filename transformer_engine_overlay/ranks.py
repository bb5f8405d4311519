# SPDX-License-Identifier: Apache-2.0
"""`status` on all ranks of a job at once: whether the overlay is active, and alike, on each."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine_overlay import environment
from transformer_engine_overlay.gate import OverlayError
from transformer_engine_overlay.patching import Status, status

logger = logging.getLogger("transformer_engine_overlay")

# Facts of `environment.describe` that may differ: a driver changes no result.
MAY_DIFFER = ("CUDA of the driver", "device")


@dataclass(frozen=True)
class RankStatus:
    """What is in place in the process of one rank.

    Attributes
    ----------
    rank : int
        Its rank in the group.
    host : str
        Name of its machine.
    status : Status
        What `transformer_engine_overlay.status` gives there.
    versions : dict
        Name to version of what its results depend on: this package, Python, torch,
        TransformerEngine, the CUDA runtime and the chips that it was built with.
    """

    rank: int
    host: str
    status: Status
    versions: dict[str, str]


@dataclass(frozen=True)
class GroupStatus:
    """What is in place on all ranks.

    Attributes
    ----------
    ranks : list of RankStatus
        In the order of the group.
    problem : str
        Which ranks are not active or differ, a line for each finding; "" if none does.
    """

    ranks: list[RankStatus]
    problem: str


def status_across_ranks(
    group: dist.ProcessGroup | None = None, *, strict: bool = True
) -> GroupStatus:
    """Compare the overlay's status on all ranks; each rank of the group must call it.

    Finds ranks whose overlay is not active or stands aside, whose versions differ, or which choose
    the path by another rule. All ranks get the same result, so that all raise or none does.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Default: all ranks. With the nccl backend, set the device of the rank first
        (`torch.cuda.set_device`), as for any gathering of objects.
    strict : bool
        Raise if there is a problem. Otherwise the first rank of the group logs it as a warning.

    Returns
    -------
    GroupStatus
        The status of each rank, and the problem, if any.

    Raises
    ------
    OverlayError
        With `strict`, if the overlay is not active on a rank or the ranks differ; the message
        names the ranks.
    RuntimeError
        If torch.distributed is not initialised, or this process is not in `group`.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group "
            "first, or status() for this process alone"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise RuntimeError(
            f"rank {dist.get_rank()} is not in the group; only its ranks can ask for its status"
        )
    # Plain data: another version of this package could not unpickle our classes.
    own = {"host": socket.gethostname(), "status": asdict(status()), "versions": _versions()}
    gathered: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group)
    ranks = [_read(number, entry) for number, entry in enumerate(gathered)]
    found = GroupStatus(ranks, "\n".join(_problems(ranks)))
    if found.problem and strict:
        raise OverlayError(found.problem)
    if found.problem and rank == 0:
        logger.warning("%s", found.problem)
    return found


def _versions() -> dict[str, str]:
    facts = environment.describe(torch.device("cpu"))
    return {name: text for name, text in facts.items() if name not in MAY_DIFFER}


def _read(rank: int, entry: dict[str, Any]) -> RankStatus:
    known = {k: v for k, v in entry["status"].items() if k in Status.__dataclass_fields__}
    return RankStatus(rank, entry["host"], Status(**known), entry["versions"])


def _problems(ranks: Sequence[RankStatus]) -> list[str]:
    """Say what is wrong, a line for each finding, with the ranks and the remedy."""
    lines = []
    # A patched library runs the kernels with nothing routed.
    inactive = [r for r in ranks if not r.status.enabled and not r.status.library]
    for why, some in _by_value([(r, r.status.problem or r.status.activation) for r in inactive]):
        lines.append(
            f"the overlay is not active on {_names(some, ranks)}: {why}. Start every rank with "
            "TE_OVERLAY_ENABLE=1, or call transformer_engine_overlay.enable(strict=True) in each"
        )
    aside = [(r, r.status.problem) for r in ranks if r.status.enabled and r.status.problem]
    for why, some in _by_value(aside):
        lines.append(f"the overlay is active but incomplete on {_names(some, ranks)}: {why}")
    names = dict.fromkeys(name for r in ranks for name in r.versions)
    versions = {name: [(r, r.versions.get(name, "unknown")) for r in ranks] for name in names}
    libraries = [(r, r.status.library or "as TransformerEngine ships it") for r in ranks]
    versions["patched core library"] = libraries
    rules = {"NVTE_FUSED_ROPE_THD_TOKEN_LINEAR": [(r, r.status.path_rule) for r in ranks]}
    for facts, remedy in (
        (versions, "Install the same on every rank"),
        (rules, "Give every rank the same environment"),
    ):
        for name, values in facts.items():
            groups = _by_value(values)
            if len(groups) > 1:
                texts = [f"{text} on {_names(some, ranks)}" for text, some in groups]
                lines.append(f"{name} differs: {'; '.join(texts)}. {remedy}")
    return lines


def _by_value(
    values: Sequence[tuple[RankStatus, str]],
) -> list[tuple[str, list[RankStatus]]]:
    """Group ranks by a text, in the order of their first ranks."""
    groups: dict[str, list[RankStatus]] = {}
    for rank, text in values:
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def _names(some: Sequence[RankStatus], ranks: Sequence[RankStatus]) -> str:
    """Name ranks in a few words: "all 8 ranks", "rank 3 (host a)", "ranks 0-2, 5 (hosts a, b)"."""
    if len(some) == len(ranks):
        return f"all {len(ranks)} ranks" if len(ranks) > 1 else "the only rank"
    spans: list[list[int]] = []
    for number in sorted(r.rank for r in some):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    numbers = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    hosts = list(dict.fromkeys(r.host for r in some))
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    plural = "s" if len(some) > 1 else ""
    return f"rank{plural} {numbers} (host{'s' if len(hosts) > 1 else ''} {shown})"
