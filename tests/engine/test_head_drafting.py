"""EAGLE-3 and Medusa inside a GPU round, run as plain torch on a CPU: drafts against the slow references, texts against
plain decoding, and what a round leaves behind for the next one."""

from __future__ import annotations

import pytest
import torch
from gpu_models import Pages, engine, gpu_model
from stand_ins import Pieces
from tiny_heads import (
    LAYERS,
    TARGET,
    SlowEagle,
    eagle_tensors,
    medusa_own,
    medusa_project,
    medusa_tensors,
    slow_medusa,
    specforge,
)

from tutorial_lib.config import (
    EagleDecodingConfig,
    LayerSkipDecodingConfig,
    MedusaDecodingConfig,
    SamplingParams,
    SimulatedAcceptance,
)
from tutorial_lib.drafters.checkpoints import read_eagle3, read_medusa
from tutorial_lib.engine.drafting import DeviceTree, ModelDrafting, Unbound
from tutorial_lib.engine.gpu_model import GpuModel, Taps
from tutorial_lib.engine.head_drafting import open_eagle_drafting, open_medusa_drafting
from tutorial_lib.engine.model import ModelConfig
from tutorial_lib.errors import OptionError
from tutorial_lib.shapes import dummy_config

PROMPTS = [[7], [5, 9, 2, 77], [(i * 37) % 319 for i in range(70)], [3, 3], [11, 200, 12]]
TEXT = Pieces.for_vocabulary(320)
CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]
DYNAMIC = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8}
EAGLE = {"eagle": {}, "eagle tree": {"eagle_choices": CHOICES}, "eagle dynamic": DYNAMIC}
SLOTS, ROWS = 5, 9


@pytest.fixture
def target() -> GpuModel:
    return gpu_model(TARGET, slots=SLOTS, max_seq_len=200, draft_len=ROWS)


def eagle(target: GpuModel, folder, **options):
    head = read_eagle3(specforge(folder / "eagle", eagle_tensors()), target.config)
    config = EagleDecodingConfig(speculative_model_dir="x", **{"max_draft_len": 4, **options})
    return open_eagle_drafting(config, target, head, SLOTS)


def medusa(target: GpuModel, folder, **options):
    checkpoint = medusa_project(folder / "medusa", medusa_tensors())
    config = MedusaDecodingConfig(speculative_model_dir="x", **options)
    return open_medusa_drafting(config, target, read_medusa(checkpoint, target.config), "medusa")


def texts(target: GpuModel, prompts, drafting=None, k: int = 0, count: int = 40, *, forced=None, **sampling):
    made = engine(target, TEXT, max_slots=SLOTS, max_seq_len=200)
    if drafting is not None:
        from tutorial_lib.engine.gpu_engine import GpuEngine

        made = GpuEngine(
            target, TEXT, (), max_slots=SLOTS, max_seq_len=200, drafting=drafting, max_draft_len=k,
            simulated_acceptance=forced and SimulatedAcceptance(acceptance_length=forced),
        )  # fmt: skip
    params = SamplingParams(max_tokens=count, ignore_eos=True, **sampling)
    return made.generate(prompts, [params] * len(prompts))


def features_of(target: GpuModel, ids, layers=LAYERS) -> torch.Tensor:
    """bf16 [len(ids), layers * H], from one pass over the text on pages of its own."""
    width = target.config.hidden_size
    out = torch.zeros(len(ids), len(layers) * width, dtype=torch.bfloat16)
    pages = Pages(target, order=range(target.pages - 1))
    for start in range(0, len(ids), 64):
        rows = torch.arange(start, min(start + 64, len(ids)), dtype=torch.int32)
        target.step(
            torch.tensor(ids[start : start + 64]), pages.table, torch.tensor([start], dtype=torch.int32),
            torch.tensor([0], dtype=torch.int32), len(rows), None, Taps(tuple(layers), out, rows),
        )  # fmt: skip
    return out


def test_features_are_the_residual_stream_after_that_many_layers():
    """Against copies taken between the layers by a target that is cut off there."""
    whole = gpu_model("dummy:tiny-llama?seed=5&layers=3", slots=1)
    ids = [5, 9, 2, 77, 4]
    both = features_of(whole, ids, (0, 2, 3))
    normed = features_of(whole, ids, (4,))
    width = whole.config.hidden_size
    assert torch.equal(both[:, :width], whole.embed[ids])
    for layers, part in ((2, both[:, width : 2 * width]), (3, both[:, 2 * width :])):
        cut = whole.without_layers(range(layers, 3))
        x, parts = cut.body(
            torch.tensor(ids), Pages(cut).table, torch.tensor([0], dtype=torch.int32),
            torch.tensor([0], dtype=torch.int32), len(ids),
        )  # fmt: skip
        assert torch.equal(part, (x.float() + parts.sum(0)).to(torch.bfloat16)), layers
    last = both[:, 2 * width :].float()
    expected = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + whole.config.rms_norm_eps) * whole.norm.float()
    assert torch.equal(normed, expected.to(torch.bfloat16))


@pytest.mark.parametrize("method", ["eagle", "eagle tree", "eagle dynamic", "medusa", "medusa tree"])
def test_greedy_text_is_that_of_plain_decoding(method, target, tmp_path):
    plain = [g.token_ids for g in texts(target, PROMPTS)]
    drafting, k = eagle(target, tmp_path, **EAGLE.get(method, {})), 4
    if "medusa" in method:
        options = {"medusa_choices": CHOICES} if method == "medusa tree" else {"num_medusa_heads": 3}
        drafting, k = medusa(target, tmp_path, **options), 3
    assert [g.token_ids for g in texts(target, PROMPTS, drafting, k)] == plain
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        assert [texts(target, [prompt], drafting, k)[0].token_ids] == [expected]


@pytest.mark.parametrize("forced", [None, 2.7])
@pytest.mark.parametrize("choices", [None, CHOICES])
def test_eagle_drafts_what_the_slow_reference_does(choices, forced, target, tmp_path):
    """Every round of three requests: the reference reads the true features of the text anew. bf16 against float32, so
    a draft may differ where the reference finds two tokens nearly the same. Random heads are hardly ever right: where
    acceptance is forced, what was accepted lies on a branch."""
    tensors, paths = eagle_tensors(), choices or [[0] * depth for depth in range(1, 5)]
    slow = SlowEagle(tensors, target.embed.float())
    ids = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).tolist()
    checked = 0
    drafting = eagle(target, tmp_path, eagle_choices=choices)
    for prompt, done in zip(PROMPTS[:3], texts(target, PROMPTS[:3], drafting, 4, 20, forced=forced), strict=True):
        assert not forced or sum(each.accepted for each in done.rounds) > 10
        text = [*prompt, *done.token_ids]
        features, length = features_of(target, text).float(), len(prompt) + 1
        for each in done.rounds[:-1]:
            x = slow.read(features[: length - 1], text[:length])
            drafted = dict(zip(map(tuple, paths), each.drafted, strict=True))
            for path, token in drafted.items():
                logits = slow.behind(x, [drafted[path[:d]] for d in range(1, len(path))])
                at_rank = logits.sort(descending=True).values[path[-1]]
                gap = abs(float(at_rank - logits[ids.index(token)]))
                assert gap < 0.05 * float(logits.std()), (length, path, gap)
                checked += gap == 0
            length += len(each.emitted)
    assert checked > (60 if forced else 100)


def test_medusa_drafts_what_the_slow_reference_does(target, tmp_path):
    tensors = medusa_tensors()
    drafting = medusa(target, tmp_path, medusa_choices=CHOICES)
    head = target.head.data.float()
    (done,) = texts(target, PROMPTS[2:3], drafting, 3, 20)
    text, length = [*PROMPTS[2], *done.token_ids], len(PROMPTS[2]) + 1
    states = features_of(target, text, (target.config.num_layers + 1,)).float()
    for each in done.rounds[:-1]:
        for path, token in zip(CHOICES, each.drafted, strict=True):
            logits = head @ slow_medusa(tensors, states[length - 2], len(path) - 1)
            at_rank = logits.sort(descending=True).values[path[-1]]
            assert abs(float(at_rank - logits[token])) < 0.05 * float(logits.std()), (length, path)
        assert each.parents == drafting.tree.of_drafts
        length += len(each.emitted)


def test_a_tree_of_the_truth_is_accepted_along_its_path(target, monkeypatch):
    """Drafts from the known text, on a branch that changes from round to round: accepted as deep as they are right,
    and what compaction leaves in the cache serves the rounds after."""
    (plain,) = texts(target, PROMPTS[2:3], count=60)
    truth, place = [*PROMPTS[2], *plain.token_ids], {(): 0}
    for row, path in enumerate(map(tuple, CHOICES), start=1):
        place[path] = row

    class Known(Unbound):
        vocab_size, feature_layers = target.config.vocab_size, ()
        tree = DeviceTree((-1, *(place[tuple(path[:-1])] for path in CHOICES)), "cpu")
        wanted, rounds = [(0, 0, 1), (1, 0), (2,), (), (0, 1), (0, 0, 0)], 0

        def draft(self, round) -> None:
            length = int(round.state.length[round.slots[0]])
            path = self.wanted[self.rounds % len(self.wanted)]
            for row, own in enumerate(map(tuple, CHOICES), start=1):
                right = truth[length + len(own) - 1]
                is_on_path = own == path[: len(own)]
                round.tokens[0, row] = right if is_on_path else (right + 1 + own[-1]) % 320
            self.rounds += 1

    known = Known()
    (done,) = texts(target, PROMPTS[2:3], known, 3, 50)
    assert done.token_ids == plain.token_ids[:50]
    for each, path in zip(done.rounds[:-1], known.wanted * 9, strict=False):
        assert each.path == tuple(place[path[:d]] - 1 for d in range(1, len(path) + 1)), path
        assert len(each.emitted) == each.accepted + 1 == len(path) + 1


@pytest.mark.parametrize("method", ["eagle", "eagle tree", "eagle dynamic", "medusa tree"])
def test_sampled_text_is_that_of_plain_decoding_too(method, target, tmp_path):
    """Drafts are certain choices, and every position has its own random number: the same seed draws the same text."""
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 4}
    plain = [g.token_ids for g in texts(target, PROMPTS[:3], **sampling)]
    drafting = medusa(target, tmp_path, medusa_choices=CHOICES)
    if "eagle" in method:
        drafting = eagle(target, tmp_path, **EAGLE[method])
    assert [g.token_ids for g in texts(target, PROMPTS[:3], drafting, 4, **sampling)] == plain
    assert plain != [g.token_ids for g in texts(target, PROMPTS[:3])]


def test_a_target_without_its_skipped_layers_drafts_for_itself(target):
    plain = [g.token_ids for g in texts(target, PROMPTS)]
    skipping = ModelDrafting(target.without_layers([3]))
    assert skipping.model.layers[3] is target.layers[4] and len(skipping.model.cache) == 6
    assert [g.token_ids for g in texts(target, PROMPTS, skipping, 3)] == plain
    whole = ModelDrafting(target.without_layers([]))
    done = texts(target, PROMPTS, whole, 3)
    assert all(r.accepted == 3 for g in done for r in g.rounds[:-1])
    assert LayerSkipDecodingConfig(skip_layers=[3]).max_draft_len == 4


def test_drafting_is_timed_for_every_method(target, tmp_path):
    from tutorial_lib.engine.gpu_engine import GpuEngine

    heads = [eagle(target, tmp_path, **options) for options in EAGLE.values()]
    for drafting, k in (*((head, 4) for head in heads), (medusa(target, tmp_path, medusa_choices=CHOICES), 3)):
        made = GpuEngine(target, TEXT, (), max_slots=2, max_seq_len=100, drafting=drafting, max_draft_len=k)
        before = made.state.table.clone()
        assert made.time_draft(k, 40, repeats=2) > 0
        assert torch.equal(made.state.table, before)
        (done,) = made.generate([[5, 9]], [SamplingParams(max_tokens=8)])
        assert done.token_ids == texts(target, [[5, 9]], count=8)[0].token_ids


def test_trees_that_no_step_holds_are_refused(target, tmp_path):
    shape = ModelConfig.from_hf(dummy_config(TARGET)[0])
    wide = MedusaDecodingConfig(speculative_model_dir="x", medusa_choices=[[i] for i in range(70)])
    heads = read_medusa(medusa_own(tmp_path / "own", medusa_tensors()), shape)
    with pytest.raises(OptionError, match="70 tokens.*63"):
        open_medusa_drafting(wide, target, heads, "own")
