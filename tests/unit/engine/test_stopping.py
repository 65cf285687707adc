from h3kv.engine.request import SamplingParameters
from h3kv.engine.stopping import FinishReason, StopRule

END = frozenset({7})


def test_end_and_stop_tokens_end_the_answer() -> None:
    rule = StopRule(SamplingParameters(stop_token_ids=(3,)), END)
    assert rule.check(7, generated=1, stop_string_found=False) is FinishReason.STOP
    assert rule.check(3, generated=1, stop_string_found=False) is FinishReason.STOP
    assert rule.check(4, generated=1, stop_string_found=False) is None
    assert rule.is_end_token(3)


def test_ignored_end_tokens_go_on_but_stop_tokens_do_not() -> None:
    rule = StopRule(SamplingParameters(stop_token_ids=(3,), ignore_eos=True), END)
    assert rule.check(7, generated=1, stop_string_found=False) is None
    assert not rule.is_end_token(7)
    assert rule.check(3, generated=1, stop_string_found=False) is FinishReason.STOP


def test_length_ends_the_answer_and_a_stop_at_the_last_token_wins() -> None:
    rule = StopRule(SamplingParameters(max_new_tokens=2), END)
    assert rule.check(1, generated=1, stop_string_found=False) is None
    assert rule.check(1, generated=2, stop_string_found=False) is FinishReason.LENGTH
    assert rule.check(7, generated=2, stop_string_found=False) is FinishReason.STOP
    assert rule.check(1, generated=2, stop_string_found=True) is FinishReason.STOP
