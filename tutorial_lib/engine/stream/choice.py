"""Which of the two GPU paths runs a model's steps, and why; nothing is loaded or launched for it.

`kernel` is "triton", "stream" (the whole-step kernel) or "auto". A build measures both and writes the times into
engine.json; auto takes the faster of them for the rows at hand. What speaks against the whole-step kernel is one
`WorkbookError`: raised if it was asked for by name, told in a line if not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import DecodingBaseConfig, EagleDecodingConfig, LayerSkipDecodingConfig, MedusaDecodingConfig
from ...errors import OptionError, WorkbookError
from .launch import GO_ON

KERNELS = ("auto", "stream", "triton")
STREAM_ROWS = 16  # rows of one launch: the columns of the smallest tile that all of its products share


@dataclass(frozen=True)
class Choice:
    """kernel: "stream" or "triton". why: half a sentence."""

    kernel: str
    why: str

    @property
    def is_stream(self) -> bool:
        return self.kernel == "stream"


def check_kernel(kernel: str, device: str = "cuda") -> None:
    """`OptionError` for a name that is none of `KERNELS`, and on a CPU for any but auto."""
    if kernel not in KERNELS:
        raise OptionError(f"kernel is {kernel!r}", f"one of {', '.join(KERNELS)}", "choose one of these")
    if device == "cpu" and kernel != "auto":
        raise OptionError(f"kernel is {kernel!r} on a CPU", "a GPU: both are kernels of its path", "leave it out")


def obstacle(
    config: DecodingBaseConfig | None, round_rows: int, *, capability: tuple[int, int], kernels_off: Sequence[str] = ()
) -> WorkbookError | None:
    """What of a GPU, a drafting method, its rounds or other options the whole-step kernel has no part for."""
    if capability != (9, 0):
        has = f"the GPU has compute capability {capability[0]}.{capability[1]}"
        return OptionError(
            has if any(capability) else "torch sees no GPU",
            "9.0 (H100, H200, GH200)",
            GO_ON,
        )
    if kernels_off:
        return OptionError(f"kernels_off names {kernels_off[0]!r}", "nothing to be switched off", GO_ON)
    if isinstance(config, (MedusaDecodingConfig, EagleDecodingConfig)):
        return refused_features()
    if isinstance(config, LayerSkipDecodingConfig):
        return refused_layers()
    if round_rows > STREAM_ROWS:
        return OptionError(
            f"a round verifies {round_rows} rows",
            f"at most {STREAM_ROWS}: max_draft_len + 1, or a tree's tokens + 1",
            f"lower max_draft_len, or {GO_ON}",
        )
    return None


def too_many(requests: int, rows: int) -> WorkbookError | None:
    """What speaks against it where the time of one request is not all that counts: so many at once do not fit a launch
    and would be served in turns, where the Triton kernels take them together."""
    if requests * rows <= STREAM_ROWS:
        return None
    return OptionError(
        f"up to {requests} requests of {rows} row{'s' if rows > 1 else ''} each may run at once",
        f"at most {STREAM_ROWS} rows together",
        f"set max_batch_size to {max(1, STREAM_ROWS // rows)}, or ask for kernel='stream'",
    )


def refused_features() -> OptionError:
    """What is said to drafters that look at the target's hidden states (EAGLE-3, Medusa)."""
    return OptionError(
        "the drafter reads hidden states of the target", "none that does: it keeps them to itself", GO_ON
    )


def refused_layers() -> OptionError:
    return OptionError("the draft leaves layers of the target out", "all of them", GO_ON)


def choose(asked: str, against: WorkbookError | None, measured: Mapping[str, Any] | None, rows: int) -> Choice:
    """The kernel for steps of `rows` rows. measured: what the build wrote, see `found_at_build`; None if nothing.

    Raises `against`, or what the build had against it, if the whole-step kernel was asked for by name.
    """
    if asked == "triton":
        return Choice("triton", "it was asked for")
    if against is None and measured is not None and "unfit" in measured:
        against = OptionError(measured["unfit"], "", GO_ON)
    if asked == "stream":
        if against is not None:
            raise against
        return Choice("stream", "it was asked for")
    if against is not None:
        needed = f", and the whole-step kernel needs {against.needed}" if against.needed else ""
        return Choice("triton", against.found + needed)
    if measured is None or not measured.get("ms"):
        return Choice("triton", "the build did not measure the whole-step kernel")
    bucket, ms = _bucket(measured["ms"], rows)
    is_faster = ms["stream"] < ms["triton"]
    why = f"a step of {bucket} took {ms['stream']:.3f} ms by the whole-step kernel, {ms['triton']:.3f} ms by Triton's"
    return Choice("stream" if is_faster else "triton", f"at the build {why}")


def _bucket(ms: Mapping[str, Mapping[str, float]], rows: int) -> tuple[str, Mapping[str, float]]:
    """The times of the smallest measured number of rows that holds `rows`, else of the largest."""
    known = sorted(ms, key=int)
    found = next((name for name in known if int(name) >= rows), known[-1])
    return f"{found} row{'s' if found != '1' else ''}", ms[found]


def found_at_build(
    ms: Mapping[int, Mapping[str, float]] | None = None,
    *,
    kernels: Sequence[Mapping[str, Any]] = (),
    unfit: WorkbookError | None = None,
) -> dict[str, Any]:
    """What engine.json keeps of the whole-step kernel: {"unfit": a sentence}, or {"ms": rows -> {"stream", "triton"},
    "kernels": the compiler's reports}."""
    if unfit is not None:
        return {"unfit": f"{unfit.found}, needed: {unfit.needed}" if unfit.needed else unfit.found}
    shown = {str(rows): {name: round(value, 4) for name, value in each.items()} for rows, each in (ms or {}).items()}
    return {"ms": shown, "kernels": [dict(report) for report in kernels]}
