"""What the retrieval setting of a speed measurement loses on windows of text that no choice has seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from h3kv.bench.measure import Progress
from h3kv.bench.results import Results
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding
from h3kv.quality import measuring as suite
from h3kv.quality.documents import Portion, read_documents, take_portion
from h3kv.quality.lanes import LaneCaps, open_banks
from h3kv.quality.statistics import summarise
from h3kv.quality.variants import RECALL_EVERY, REFERENCE, Variant
from h3kv.quality.weights import load_rounded
from h3kv.quality.windows import WindowSizes, choose_windows, score_windows

PREFIX: Final = "decode.retrieval.quality_8k"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is scored."""

    windows: int
    window: WindowSizes


FULL: Final = Sizes(2, WindowSizes(suite.FULL.window.context_tokens, scored_tokens=1024))
QUICK: Final = Sizes(1, WindowSizes(suite.QUICK.window.context_tokens, scored_tokens=64))


def run(
    results: Results,
    model: str,
    setting: RetrievalSetting,
    *,
    sizes: Sizes,
    window_tokens: int,
    progress: Progress,
) -> None:
    """Put perplexity, its standard error, mean KL and top-1 of one setting against full attention.

    Args:
        results: receives `decode.retrieval.quality_8k.*`.
        model: source of the weights.
        setting: budget, dense layers and shortlist.
        sizes: how much is scored.
        window_tokens: newest tokens that are read exactly.
        progress: hears of what was done.

    Raises:
        ConfigError: WikiText-2 is not there: only a checkout of the repository has it.
    """
    loaded = load_rounded(model)
    documents = take_portion(loaded.tokenizer, read_documents([]), Portion.UNSEEN)
    windows = choose_windows(documents, sizes.window, sizes.windows)
    variant = Variant("retrieval", Encoding.K8V4, replace(setting, recall_every=RECALL_EVERY))
    caps = LaneCaps(window_tokens, suite.FULL.chunk_tokens, sizes.window.tokens)
    with open_banks(loaded, [REFERENCE, variant], caps) as banks:
        scores = score_windows(banks, [variant], windows, sizes=sizes.window, progress=progress)
    fidelity = summarise(scores.blocks[variant.name])
    results.put(f"{PREFIX}.perplexity_change", fidelity.perplexity_change)
    results.put(f"{PREFIX}.perplexity_se", fidelity.perplexity_se)
    results.put(f"{PREFIX}.mean_kl", fidelity.mean_kl)
    results.put(f"{PREFIX}.top1", fidelity.top1)
