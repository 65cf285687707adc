"""gpu_worker over the HOST memory and the cold store of nvme_io: the same answers, found in the same tiers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.integration.nvme_io_rig import nvme_io
from tests.integration.service_rig import PROMPT, Rig, running, wait_for

from h3kv.testing.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

LONG = f"{PROMPT * 3}What does Jack lack?"
CAPS = {"HOST_BYTES": "64MiB", "CAPACITY": "64MiB"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, max_position_embeddings=2048)
    return folder


def remote(folder: Path) -> dict[str, object]:
    return {"TIERS": "services", "NVME_IO": f"unix://{folder / 'nvme_io.sock'}", "DEVICE__WINDOW_TOKENS": 128}


def ask(rig: Rig) -> tuple[str, dict[str, int]]:
    fields = rig.complete(prompt=LONG, max_tokens=16).fields
    assert "choices" in fields, fields
    return fields["choices"][0]["text"], fields["usage"]["h3"]["cached_tokens"]


def test_answers_are_those_of_embedded_tiers_and_outlive_the_worker(model: Path, tmp_path: Path) -> None:
    (tmp_path / "embedded").mkdir()
    with running(tmp_path / "embedded", model, worker={"HOST__KV_BYTES": "64MiB"}) as rig:
        expected, _ = ask(rig)
    with nvme_io(tmp_path, **CAPS), running(tmp_path, model, worker=remote(tmp_path)) as rig:
        text, cached = ask(rig)
        assert (text, sum(cached.values())) == (expected, 0)
        text, cached = ask(rig)
        assert text == expected
        assert cached["host"] > 0
        assert rig.worker.end() == 0, rig.worker.text()
        rig.start_worker()
        rig.wait_until_serving()
        text, cached = ask(rig)
        assert text == expected
        assert cached["nvme"] > 0


def test_killed_worker_leaves_its_room_to_the_next_one(model: Path, tmp_path: Path) -> None:
    with nvme_io(tmp_path, **CAPS), running(tmp_path, model, worker=remote(tmp_path)) as rig:
        expected, _ = ask(rig)
        for _ in range(2):
            stream = rig.stream(prompt=PROMPT, max_tokens=1600)
            next(stream.events())
            assert rig.worker.end(with_signal=signal.SIGKILL) == -signal.SIGKILL
            stream.close()
            rig.start_worker()
            rig.wait_until_serving()
            assert ask(rig)[0] == expected
        wait_for(rig.is_idle, what="the node to be idle")


def test_worker_without_the_owner_of_its_memory_says_so(model: Path, tmp_path: Path) -> None:
    worker = {"TIERS": "services"}
    with pytest.raises(AssertionError, match="need its unix socket"), running(tmp_path, model, worker=worker):
        pytest.fail("it serves")


def test_killed_owner_of_the_memory_comes_back_under_a_running_worker(model: Path, tmp_path: Path) -> None:
    with nvme_io(tmp_path, **CAPS) as owner, running(tmp_path, model, worker=remote(tmp_path)) as rig:
        expected, _ = ask(rig)
        for _ in range(2):
            stream = rig.stream(prompt=LONG, max_tokens=900)
            events = stream.events()
            next(events)
            owner.kill()
            owner.start()
            last = list(events)[-1]
            assert stream.ended or last["error"]["code"] in {"peer_unavailable", "slab_unavailable"}, last
            owner.wait_until_serving()
            assert ask(rig)[0] == expected
        assert rig.worker.process.poll() is None, "it went on all the time"
