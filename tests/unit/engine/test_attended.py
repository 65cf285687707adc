"""How much of what is there an answer attends to."""

from h3kv.attention.retrieval import RetrievalMeter
from h3kv.engine.attended import AttendedTokens


def test_without_a_token_there_is_no_fraction() -> None:
    assert AttendedTokens(layers=4, kv_heads=2, window_tokens=64).fraction is None


def test_exact_attention_reads_everything() -> None:
    attended = AttendedTokens(layers=4, kv_heads=2, window_tokens=64)
    for tokens in (100, 101):
        attended.add(tokens, RetrievalMeter(), RetrievalMeter())
    assert attended.fraction == 1.0


def test_retrieval_reads_window_strangers_to_the_index_and_what_it_chose() -> None:
    attended = AttendedTokens(layers=4, kv_heads=2, window_tokens=100)
    # One of four layers reads all 1,000 tokens; three read the window of 100, together 30 outside it, and 120 chosen
    # tokens in two KV heads.
    attended.add(1000, RetrievalMeter(), RetrievalMeter(rows=3, exact_tokens=30, chosen_tokens=120))
    assert attended.fraction == (1000 + 3 * 100 + 30 + 60) / 4000
