import threading

import pytest

from h3kv.core.errors import NumericsError, PeerUnavailableError, StaleHandleError
from h3kv.engine.events import Failed, Finished, PrefillProgress, RequestStatistics, TokenGenerated
from h3kv.engine.request import RequestId
from h3kv.engine.stopping import FinishReason
from services.gpu_worker.outbox import Outbox

ID = RequestId(1)
STATISTICS = RequestStatistics(
    prompt_tokens=3,
    cached_tokens={},
    generated_tokens=1,
    waiting_ns=0,
    prefill_ns=0,
    time_to_first_token_ns=None,
    inter_token_ns=(),
)
END = Finished(ID, FinishReason.STOP, STATISTICS)
TOKEN = TokenGenerated(ID, 7, "x")


def progress(done: int) -> PrefillProgress:
    return PrefillProgress(ID, done, 0, 300)


def test_events_come_out_in_order_and_end_after_the_last() -> None:
    outbox = Outbox(1)
    for event in (progress(300), TOKEN, END):
        outbox.put(event)
    assert [outbox.take() for _ in range(4)] == [progress(300), TOKEN, END, None]


def test_unread_progress_is_replaced_by_the_newest() -> None:
    outbox = Outbox(1)
    outbox.put(progress(100))
    assert outbox.take() == progress(100)
    outbox.put(progress(200))
    outbox.put(progress(300))
    outbox.put(END)
    assert [outbox.take() for _ in range(3)] == [progress(300), END, None]


def test_failure_comes_after_what_was_said_before() -> None:
    outbox = Outbox(1)
    outbox.put(TOKEN)
    outbox.put(Failed(ID, NumericsError("no number: try fp32")))
    outbox.put(END)
    outbox.fail(PeerUnavailableError("gone: repeat it", peer="gpu_worker"))
    assert outbox.take() == TOKEN
    for _ in range(2):
        with pytest.raises(NumericsError):
            outbox.take()


def test_caller_is_not_told_of_handles_but_to_send_its_request_again() -> None:
    outbox = Outbox(1)
    outbox.put(Failed(ID, StaleHandleError("host slot 3 was released: look the slab up again")))
    with pytest.raises(PeerUnavailableError, match="send it again"):
        outbox.take()


def test_closed_outbox_forgets_everything_and_wakes_its_reader() -> None:
    outbox = Outbox(1)
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(outbox.take()))
    reader.start()
    outbox.close()
    reader.join(30)
    outbox.put(TOKEN)
    assert (found, outbox.take()) == ([None], None)


def test_more_than_a_request_can_say_is_our_mistake() -> None:
    outbox = Outbox(1)
    for _ in range(3):
        outbox.put(TOKEN)
    with pytest.raises(AssertionError, match="says more"):
        outbox.put(TOKEN)
