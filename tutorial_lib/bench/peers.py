"""Several engines side by side: the same prompts, the same K, taking turns prompt by prompt in one run.

Every backend runs plain and with the drafter, as far as it can; vLLM and TensorRT-LLM in processes of their own. Text
is compared with that of the reference, the torch backend where it runs, token by token. A backend that is not here or
refuses is listed with its reason. With several K the drafter runs at each, and `best_rows` says which is each engine's
own best at which acceptance. Times and figures come from `measure`; this module chooses, opens and gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ..api import BACKENDS
from ..config import SamplingParams, SimulatedAcceptance
from ..drafter_options import DrafterOptions, decoding_config
from ..errors import BackendUnavailable, OptionError, WorkbookError
from ..results import Generation, without_folders
from .cost_model import expected_tokens
from .measure import Measurable, Say, Session, between, compare
from .prompts import Prompt, load_prompts, render, select
from .summary import PLAIN, first_differences, paired_speedups

EXPERIMENT = "compare"
IN_A_CHILD = ("vllm", "tensorrt_llm")
PROBABILITIES = (0.6, 0.7, 0.8, 0.9)  # of a draft token to be right, for which the best K is told
Maker = Callable[[str, "Asked", DrafterOptions | None, Sequence[Prompt]], Measurable]


@dataclass(frozen=True)
class Asked:
    """What all backends are asked to run. dtype "auto": bfloat16 on a GPU, float32 on a CPU, so that all agree;
    device likewise, but for engines in processes of their own, which are told what was asked (`child_device`).
    acceptance_length: forced, where an engine has it; or acceptance_probability, from which every K has its own length.
    draft_lens: run the drafter at each of these K in the place of its own."""

    target: str = "embedded:target"
    drafter: DrafterOptions | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    tensor_parallel_size: int = 1
    acceptance_length: float | None = None
    child_device: str = "auto"
    draft_lens: tuple[int, ...] = ()
    acceptance_probability: float | None = None

    def forced_length(self, drafter: DrafterOptions | None) -> float | None:
        """The acceptance length to force on `drafter`; None for plain decoding, and where nothing is forced."""
        if drafter is None:
            return None
        if self.acceptance_probability is not None:
            return expected_tokens(self.acceptance_probability, drafter.k)
        return self.acceptance_length

    @property
    def params(self) -> SamplingParams:
        """Random weights end an answer at random, so there the limit alone does."""
        ends: dict[str, Any] = {"max_tokens": self.max_tokens, "ignore_eos": self.target.startswith("dummy:")}
        if not self.temperature:
            return SamplingParams(**ends)
        return SamplingParams(**ends, temperature=self.temperature, seed=self.seed)


def compare_backends(
    backends: Sequence[str],
    asked: Asked,
    *,
    prompts: Sequence[Prompt] | None = None,
    repeats: int = 3,
    one_at_a_time: bool = False,
    prompt_set: str = "bundled",
    command: str = "",
    say: Say = print,
    make: Maker | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda so_far: None,
    **options: Any,
) -> dict[str, Any]:
    """Run them and return {"kind", "experiment", "runs": records, "summary": {...}}.

    prompts: all of these; without, one of every category of the bundled ones. one_at_a_time: where the models do not
    fit into memory together, each engine does all its repeats before the next is loaded, on the first turn of every
    prompt; a machine that drifts then favours one, and the summary says so. keep: gets what there is whenever an
    engine of these is done, so that a run that is cut off keeps it. options: further ones of `measure.compare`.
    Raises `OptionError` where nothing could be run at all, and for unknown or repeated names.
    """
    check_names(backends)
    check_sweep(asked)
    for _, drafter in _variants(asked):
        if drafter is not None:
            decoding_config(drafter)  # mistakes show before any work
    asked = settled(asked)
    prompts = select(load_prompts(), 1) if prompts is None else list(prompts)
    if one_at_a_time:
        prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    opener = _Opener(asked, prompts, make or open_llm, say)
    common: dict[str, Any] = {
        "repeats": repeats,
        "experiment": EXPERIMENT,
        "prompt_set": prompt_set,
        "command": command,
        "say": say,
    }

    def measured(llms: Mapping[str, Measurable]) -> Session:
        return compare(llms, prompts, asked.params, methods=opener.methods, **common, **options)

    def document(session: Session) -> dict[str, Any]:
        summary = summarize(backends, session, opener.why, asked)
        if one_at_a_time:
            summary["notes"].append(
                "engines ran one after another, not in turns: what the machine drifts is in the ratios"
            )
        runs = list(session.records.values())
        return {"kind": "comparison", "experiment": EXPERIMENT, "profile": "", "runs": runs, "summary": summary}

    if one_at_a_time:
        session = _in_sequence(backends, opener, measured, lambda so_far: keep(document(so_far)))
    else:
        session = _in_turns(backends, opener, measured)
    if not session.records:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in opener.why.items())
        raise OptionError(f"none of the backends runs here ({reasons})", "at least one", "see the reasons")
    return document(session)


def _in_turns(
    backends: Sequence[str], opener: _Opener, measured: Callable[[Mapping[str, Measurable]], Session]
) -> Session:
    """All engines loaded, every prompt answered by each before the next."""
    with ExitStack() as stack:
        llms = dict(opener.opened(backends, stack))
        return measured(llms) if llms else Session({}, {}, [])


def _in_sequence(
    backends: Sequence[str],
    opener: _Opener,
    measured: Callable[[Mapping[str, Measurable]], Session],
    keep: Callable[[Session], None],
) -> Session:
    """Each engine alone, closed before the next is opened."""
    whole = Session({}, {}, [])
    with ExitStack() as stack:
        for name, llm in opener.opened(backends, stack):
            found = measured({name: llm})
            stack.close()
            whole.records |= found.records
            whole.generations |= found.generations
            whole.walls |= found.walls
            whole.requests = found.requests
            keep(whole)
    return whole


def check_names(backends: Sequence[str]) -> None:
    if unknown := [name for name in backends if name not in BACKENDS]:
        raise OptionError(f"backend {unknown[0]!r} is unknown", f"some of {', '.join(BACKENDS)}", "correct --backends")
    if len(backends) < 2 or len(set(backends)) < len(backends):
        raise OptionError(f"backends are {', '.join(backends) or 'none'}", "at least two, each once")


def check_sweep(asked: Asked) -> None:
    lens, both = asked.draft_lens, asked.acceptance_length is not None and asked.acceptance_probability is not None
    if lens and (asked.drafter is None or min(lens) < 1 or len(set(lens)) < len(lens)):
        raise OptionError(f"K is {', '.join(map(str, lens))}", "a drafter, and numbers from 1 on, each once")
    if both or (lens and asked.acceptance_length is not None):
        raise OptionError(
            "an acceptance length for several K, or beside a probability", "one way to force acceptance",
            "give the probability, from which every K has its own length",
        )  # fmt: skip
    if asked.acceptance_probability is not None and not 0 <= asked.acceptance_probability <= 1:
        raise OptionError(f"acceptance probability is {asked.acceptance_probability:g}", "0 to 1")


def settled(asked: Asked) -> Asked:
    """`asked` with one device and one number format for all backends."""
    from ..engine.build import choose_device

    device = choose_device(asked.device)
    dtype = asked.dtype if asked.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    return replace(asked, device=device, dtype=dtype, child_device=asked.device)


# ---- opening --------------------------------------------------------------------------------------------------------


class _Opener:
    """Opens engine after engine. methods: of those that answered, by name ("vllm plain"); why: the others do not."""

    def __init__(self, asked: Asked, prompts: Sequence[Prompt], make: Maker, say: Say) -> None:
        self.asked, self.prompts, self.make, self.say = asked, prompts, make, say
        self.methods: dict[str, str] = {}
        self.why: dict[str, str] = {}

    def opened(self, backends: Sequence[str], stack: ExitStack) -> Iterator[tuple[str, Measurable]]:
        """Every engine that answers, tried on a few tokens; `stack` closes it."""
        for backend in backends:
            for method, drafter in _variants(self.asked):
                name = f"{backend} {method}"
                if name in self.why:
                    continue
                self.say(f"loading {name}")
                try:
                    llm = self._open(backend, drafter, stack)
                except (WorkbookError, RuntimeError) as error:  # the latter are a GPU's: memory, a graph not captured
                    self._refused(name, backend, error)
                else:
                    self.methods[name] = PLAIN if drafter is None else method_name(drafter)
                    yield name, llm

    def _open(self, backend: str, drafter: DrafterOptions | None, stack: ExitStack) -> Measurable:
        with ExitStack() as trial:
            llm = self.make(backend, self.asked, drafter, self.prompts)
            trial.callback(llm.close)
            llm.generate(render(self.prompts[0], llm.tokenizer), SamplingParams(max_tokens=3, ignore_eos=True))
            stack.push(trial.pop_all())
        return llm

    def _refused(self, name: str, backend: str, error: Exception) -> None:
        """A backend that is not here at all is not asked again."""
        why = without_folders(str(error))
        self.say(f"not run: {name}: {why}")
        others = [f"{backend} {method}" for method, _ in _variants(self.asked)]
        is_gone = isinstance(error, BackendUnavailable) and not any(other in self.methods for other in others)
        self.why |= dict.fromkeys(others if is_gone else [name], why)


def _variants(asked: Asked) -> list[tuple[str, DrafterOptions | None]]:
    """What every backend runs, by the name that entries have."""
    if asked.drafter is None:
        return [(PLAIN, None)]
    method = method_name(asked.drafter)
    if not asked.draft_lens:
        return [(PLAIN, None), (method, asked.drafter)]
    swept = [replace(asked.drafter, max_draft_len=k) for k in asked.draft_lens]
    return [(PLAIN, None), *((f"{method} K={drafter.k}", drafter) for drafter in swept)]


def method_name(drafter: DrafterOptions) -> str:
    """As records and plots call it: "draft_target", "ngram", "eagle3", …"""
    config = decoding_config(drafter)
    kind = config.decoding_type.lower() if config is not None else PLAIN
    return {"eagle": "eagle3", "sa": "suffix"}.get(kind, kind)


def open_llm(backend: str, asked: Asked, drafter: DrafterOptions | None, prompts: Sequence[Prompt]) -> Measurable:
    """The real thing. A drafter's acceptance is forced where that was asked; plain decoding has none to force."""
    from ..api import LLM
    from ..models import load_tokenizer, resolve
    from .remote import RemoteLLM

    options: dict[str, Any] = {"dtype": asked.dtype, "device": asked.device}
    options["tensor_parallel_size"] = asked.tensor_parallel_size
    forced = asked.forced_length(drafter)
    if backend != "transformers":  # which needs no limits; the others prepare for what they are told
        tokenizer = load_tokenizer(resolve(asked.target, say=lambda line: None))
        options |= {"max_batch_size": 1, "max_seq_len": longest(prompts, tokenizer, asked)}
    if backend in IN_A_CHILD:
        options["device"] = asked.child_device
        return RemoteLLM(
            asked.target, backend=backend, tokenizer=tokenizer, drafter=drafter, acceptance_length=forced, **options
        )
    if forced is not None:
        options["simulated_acceptance"] = SimulatedAcceptance(acceptance_length=forced)
    config = None if drafter is None else decoding_config(drafter)
    return LLM(asked.target, backend=backend, speculative_config=config, **options)


def longest(prompts: Sequence[Prompt], tokenizer: Any, asked: Asked) -> int:
    """Positions that the longest conversation takes, its answers and a round's drafts included, in steps of 256."""
    k = max(asked.draft_lens, default=asked.drafter.k) if asked.drafter else 0
    needed = max(
        len(render(Prompt(p.question_id, p.category, ("\n".join(p.turns),)), tokenizer))
        + len(p.turns) * (asked.max_tokens + 32)
        for p in prompts
    )
    return -(-(needed + k + 1) // 256) * 256


# ---- what came out --------------------------------------------------------------------------------------------------


def summarize(
    backends: Sequence[str],
    session: Session,
    why: Mapping[str, str],
    asked: Asked,
) -> dict[str, Any]:
    """One entry for every backend and method, run or not. Ratios are to the reference's run of the same method."""
    ran = [backend for backend in backends if any(name.split()[0] == backend for name in session.records)]
    reference = "torch" if "torch" in ran else ran[0]
    entries = []
    for backend in backends:
        for method, _ in _variants(asked):
            name = f"{backend} {method}"
            if name in session.records:
                entries.append(_entry(name, backend, method, session, reference, asked))
            else:
                entries.append({"backend": backend, "method": method, "status": "not run", "why": why.get(name, "")})
    found = {
        "reference": reference,
        "ran": ran,
        "entries": entries,
        "is_simulated": any(record["is_simulated"] for record in session.records.values()),
        "notes": [f"{name}: {note}" for name, record in session.records.items() for note in record["notes"]],
    }
    return found | ({"best": best_rows(session.records.values(), reference)} if asked.draft_lens else {})


def best_rows(records: Iterable[Mapping[str, Any]], reference: str) -> list[dict[str, Any]]:
    """For every probability and every backend that ran plain and at several K: its own best K, what that yields in
    decoding, and how it stands against `reference` at its own best.

    A round's time does not hang on what is accepted, so the measured times serve every probability; between two K that
    were run it lies on a straight line, and `is_measured` says which K were. Sets beside each other what is recorded.
    """
    round_s: dict[str, dict[int, float]] = {}
    for record in records:
        if record["figures"]["round_ms"] is not None:
            round_s.setdefault(record["backend"], {})[record["max_draft_len"]] = record["figures"]["round_ms"] / 1e3
    rows = []
    for alpha in PROBABILITIES:
        best: dict[str, dict[str, Any]] = {}
        for backend, times in round_s.items():
            drafted = {k: seconds for k, seconds in times.items() if k}
            if 0 not in times or not drafted:
                continue
            rates = {
                k: expected_tokens(alpha, k) / between(drafted, k) for k in range(min(drafted), max(drafted) + 1)
            } | {0: 1 / times[0]}
            k = max(rates, key=lambda k: (rates[k], -k))
            best[backend] = {
                "alpha": alpha, "backend": backend, "best_k": k, "is_measured": k in times,
                "acceptance_length": expected_tokens(alpha, k), "decode_tok_s": rates[k],
                "speedup": rates[k] * times[0],
            }  # fmt: skip
        for backend, row in best.items():
            base = best.get(reference) if backend != reference else None
            rows.append(
                row | {"against_reference": None if base is None else row["decode_tok_s"] / base["decode_tok_s"]}
            )
    return rows


def describe_best(rows: Sequence[Mapping[str, Any]], reference: str) -> list[dict[str, Any]]:
    """`best_rows` for a table of plain values."""
    return [
        {
            "right per token": row["alpha"],
            "backend": row["backend"],
            "best K": row["best_k"] if row["best_k"] else "plain",
            "tokens a round": row["acceptance_length"],
            "decoded tokens/s": row["decode_tok_s"],
            "over its own plain": row["speedup"],
            f"against {reference}": row["against_reference"],
            "round's time": "measured" if row["is_measured"] else "between two measured K",
        }
        for row in rows
    ]


def _entry(name: str, backend: str, method: str, session: Session, reference: str, asked: Asked) -> dict[str, Any]:
    record = session.records[name]
    figures = record["figures"]
    cold = [f["output_tok_s"] for f in record["repeat_figures"] if not f["is_warm"]]
    plain, same = session.records.get(f"{backend} {PLAIN}"), session.records.get(f"{reference} {method}")
    is_plain = method == PLAIN
    paired = paired_speedups(plain, record) if plain is not None and not is_plain else []
    return {
        "backend": backend,
        "method": method,
        "status": "ran",
        "dtype": record["dtype"],
        "output_tok_s": figures["output_tok_s"],
        "output_tok_s_range": [min(cold), max(cold)],
        "tpot_ms": figures["tpot_ms"],
        "acceptance_length": figures["acceptance_length"],
        "speedup": None if is_plain or plain is None else _ratio(record, plain),
        "speedup_range": [min(paired), max(paired)] if paired else None,
        "against_reference": None if backend == reference or same is None else _ratio(record, same),
        **_text(name, session, reference, asked),
    }


def _ratio(record: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    return record["figures"]["output_tok_s"] / base["figures"]["output_tok_s"]


def _text(name: str, session: Session, reference: str, asked: Asked) -> dict[str, Any]:
    """Token ids against the reference's plain run, every repeat of them; None where texts say nothing."""
    base = f"{reference} {PLAIN}"
    records = session.records
    nothing = {"same_text": None, "answers": None, "different_answers": None, "first_difference": None}
    if asked.params.temperature:
        return nothing | {"text_note": "not compared: sampled texts differ"}
    if base not in records or records[base]["is_simulated"] or records[name]["is_simulated"]:
        return nothing | {"text_note": "not compared: simulated, or no reference"}
    theirs, ours = session.generations[base][0], session.generations[name]
    found = first_differences([theirs], ours)
    first = min(found, key=lambda d: (d["first_difference"], d["request"]), default=None)
    return {
        "same_text": not found,
        "answers": len(theirs),
        "different_answers": len({d["request"] for d in found}),
        "first_difference": None if first is None else _difference(first, theirs, ours),
        "text_note": "",
    }


def _difference(
    found: Mapping[str, Any], theirs: Mapping[str, Generation], ours: Sequence[Mapping[str, Generation]]
) -> dict[str, Any]:
    """The earliest token that differs: its index, and both ids there (None: that answer had ended)."""
    at, key = found["first_difference"], found["request"]
    ids = theirs[key].token_ids, ours[found["repeat"] - 1][key].token_ids
    reference, other = (tokens[at] if at < len(tokens) else None for tokens in ids)
    return {"request": key, "token": at, "reference": reference, "found": other}


def describe(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for every entry, for a table of plain values."""
    rows = []
    for e in summary["entries"]:
        row: dict[str, Any] = {"backend": e["backend"], "method": e["method"]}
        if e["status"] != "ran":
            rows.append(row | {"text": f"not run: {e['why']}"})
            continue
        low, high = e["output_tok_s_range"]
        has_drafts = e["method"] != PLAIN
        length = "–" if not has_drafts else "not available"
        if e["acceptance_length"] is not None:
            length = f"{e['acceptance_length']:.2f}"
        rows.append(
            row
            | {
                "output tokens/s": e["output_tok_s"],
                "lowest … highest": f"{low:.2f} … {high:.2f}",
                "speed-up": e["speedup"],
                f"against {summary['reference']}": e["against_reference"],
                "acceptance length": length,
                "text": text_words(e, summary["reference"]),
            }
        )
    return rows


def text_words(entry: Mapping[str, Any], reference: str) -> str:
    if entry["same_text"] is None:
        return entry["text_note"]
    if entry["same_text"]:
        is_it = entry["backend"] == reference and entry["method"] == PLAIN
        return "the reference" if is_it else f"as {reference}'s, token for token"
    first = entry["first_difference"]
    return (
        f"{entry['different_answers']} of {entry['answers']} answers differ, first at token {first['token']} of "
        f"{first['request']}"
    )
